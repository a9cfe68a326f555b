//! The documentation in Markdown files: the README and the guides.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the README.
pub fn readme() -> String {
    fs::read_to_string(root().join("README.md")).unwrap()
}

/// Returns the file name and the text of each guide, and of the page that lists them.
pub fn guides() -> Vec<(String, String)> {
    let files = fs::read_dir(root().join("src/guide")).unwrap().map(|entry| entry.unwrap().path());
    let mut guides: Vec<_> = files
        // The targets of their links.
        .filter(|file| !file.ends_with("links.md"))
        .map(|file| (file.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(file).unwrap()))
        .collect();
    guides.sort();
    assert!(guides.len() >= 10, "the guides were found");
    guides
}

/// Returns each `cargo run --example COMMAND` of the README and the guides, without `cargo run
/// --example`.
pub fn example_commands() -> Vec<String> {
    let pages = guides().into_iter().map(|(_, text)| text).chain([readme()]);
    let commands: Vec<String> = pages.flat_map(|page| commands_of(&page)).collect();
    assert!(commands.len() >= 34, "the commands were found");
    commands
}

fn commands_of(page: &str) -> Vec<String> {
    let rests = page.split("cargo run --example ").skip(1);
    rests.map(|rest| rest.split(['`', '\n']).next().unwrap().to_owned()).collect()
}
