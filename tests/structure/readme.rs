//! The README and the guides: their examples, code and tables are up to date, and their links exist
//! in the published package.

use std::fs;
use std::path::Path;

use common::pages::{example_commands, guides, readme};

use crate::ROOT;

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap()
}

#[test]
fn examples_of_the_pages_exist_and_name_the_features_they_need() {
    let manifest = read("examples/Cargo.toml");
    for command in example_commands() {
        let (name, rest) = command.split_once(' ').unwrap_or((&command, ""));
        let target = manifest.split("[[example]]").find(|target| target.contains(&format!("name = \"{name}\"")));
        let target = target.unwrap_or_else(|| panic!("examples/Cargo.toml has no example {name}"));
        if let Some(features) = target.split("required-features = [\"").nth(1) {
            let feature = features.split('"').next().unwrap();
            assert!(rest.contains(&format!("--features {feature}")), "{name} needs --features {feature}: {rest}");
        }
    }
}

#[test]
fn every_example_has_a_command_in_the_pages() {
    let (manifest, commands) = (read("examples/Cargo.toml"), example_commands());
    let examples: Vec<&str> =
        manifest.split("[[example]]\nname = \"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(examples.len() > 10, "the examples were found");
    for example in examples {
        let is_named = commands.iter().any(|command| command.split(' ').next() == Some(example));
        assert!(is_named, "no guide has a command for the example {example}");
    }
}

/// A relative link of the README leads to a file of the published package.
#[test]
fn links_of_the_readme_lead_to_packaged_files() {
    let (readme, manifest) = (readme(), read("Cargo.toml"));
    let include = manifest.split("include = [").nth(1).unwrap().split(']').next().unwrap();
    let links: Vec<&str> = readme.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    assert!(!links.is_empty(), "the links were found");
    for link in links.into_iter().filter(|link| !link.starts_with("https://") && !link.starts_with('#')) {
        assert!(Path::new(ROOT).join(link).is_file(), "{link} does not exist");
        let is_packaged = |path: &Path| include.contains(&format!("\"/{}\"", path.display()));
        assert!(Path::new(link).ancestors().any(is_packaged), "{link} is not in `include` of Cargo.toml");
    }
}

#[test]
fn readme_links_to_every_guide() {
    let readme = readme();
    for (file, _) in guides().iter().filter(|(file, _)| file != "mod.rs") {
        assert!(readme.contains(&format!("](src/guide/{file})")), "{file}");
    }
}

/// The compiler checks the code of the guides and of the crate's docs. So the code of the README is
/// taken from there.
#[test]
fn code_of_the_readme_is_in_the_guides_or_the_crate_docs() {
    let checked: String = guides().into_iter().map(|(_, text)| text).chain([read("src/lib.rs")]).collect();
    let checked: Vec<&str> = checked.lines().map(|line| line.trim_start_matches("//!").trim()).collect();
    let readme = readme();
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 9, "the code was found");
    for line in blocks.into_iter().flat_map(str::lines).map(str::trim) {
        assert!(checked.contains(&line), "no guide has the line {line:?}");
    }
}

/// The guide repeats rows of the table of the memory storage.
#[test]
fn memory_table_of_the_guide_equals_that_of_the_storage() {
    let (guide, measured) = (read("src/guide/operating.md"), read("src/storage/memory/capacity.md"));
    let table = guide.split("# Memory of the process").nth(1).unwrap().split("\n# ").next().unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).collect();
    assert!(rows.len() > 4, "the rows were found");
    for row in rows {
        assert!(measured.lines().any(|line| line == row), "{row}");
    }
}

/// The first two commands of a new contributor.
#[test]
fn readme_names_the_commands_that_start_the_server_and_run_all_tests() {
    for command in ["cargo run --example server", "scripts/test"] {
        assert!(readme().contains(&format!("`{command}`")), "{command}");
    }
    assert!(read("examples/Cargo.toml").contains("name = \"server\""));
    assert!(read("scripts/test").contains("cargo test --workspace --all-features"));
}

#[test]
fn readme_has_at_most_120_lines() {
    assert!(readme().lines().count() <= 120);
}
