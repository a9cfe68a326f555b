//! The README and the guides: their examples, code and tables are up to date, and their links exist
//! in the published package.

use std::collections::BTreeSet;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::pages::{example_commands, guides, readme};

use crate::ROOT;

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap()
}

/// Returns the Rust and Markdown files of a folder and its folders, with their texts.
fn files_of(folder: &str) -> Vec<(PathBuf, String)> {
    let (mut files, mut folders) = (Vec::new(), vec![Path::new(ROOT).join(folder)]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "md") {
                let text = fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    files
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

/// The compiler checks the code of the guides and of the crate's docs. So the code of the README is
/// taken from there.
#[test]
fn code_of_the_readme_is_in_the_guides_or_the_crate_docs() {
    let checked: String = guides().into_iter().map(|(_, text)| text).chain([read("src/lib.rs")]).collect();
    let checked: Vec<&str> = checked.lines().map(|line| line.trim_start_matches("//!").trim()).collect();
    let readme = readme();
    let blocks = rust_blocks(&readme, "rust");
    assert!(blocks.len() >= 9, "the code was found");
    let lines = blocks.into_iter().flat_map(str::lines).map(str::trim);
    // The next test checks the imports.
    for line in lines.filter(|line| !line.starts_with("use ")) {
        assert!(checked.contains(&line), "no guide has the line {line:?}");
    }
}

/// Returns the texts of the blocks of Rust in a page.
fn rust_blocks<'a>(page: &'a str, fence: &str) -> Vec<&'a str> {
    page.split(&format!("```{fence}\n")).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// Returns the paths of the items that code imports, such as `tower_ratelimit::Key`.
fn imported(code: &str) -> BTreeSet<String> {
    let code: Vec<&str> = code.lines().map(|line| line.trim_start_matches("//!").trim()).collect();
    let mut paths = BTreeSet::new();
    for import in code.join("\n").split("\nuse ").skip(1).filter_map(|rest| Some(rest.split_once(';')?.0)) {
        // The prefixes of the braces that are open.
        let (mut prefixes, mut path) = (Vec::new(), String::new());
        for c in import.chars().filter(|c| !c.is_whitespace()) {
            match c {
                '{' => prefixes.push(mem::take(&mut path)),
                ',' => drop(paths.insert(prefixes.concat() + &mem::take(&mut path))),
                '}' => {
                    paths.insert(prefixes.concat() + &mem::take(&mut path));
                    prefixes.pop();
                }
                c => path.push(c),
            }
        }
        paths.insert(prefixes.concat() + &path);
    }
    paths.retain(|path| !path.is_empty() && !path.ends_with("::"));
    paths
}

/// A reader copies the recipes. So each name in them is imported, or named before the recipes.
#[test]
fn readme_imports_the_names_in_its_code() {
    let (readme, checked) = (readme(), guides().into_iter().map(|(_, text)| text).collect::<String>());
    let code = rust_blocks(&readme, "rust").join("\n");
    let imports = imported(&format!("\n{code}"));
    assert!(imports.contains("tower_ratelimit::extract::Extension") && imports.len() > 12, "{imports:?}");
    let of_guides = imported(&(checked + &read("src/lib.rs")));
    for path in &imports {
        assert!(of_guides.contains(path), "no guide imports {path}");
    }
    let recipes = readme.split("## Recipes").nth(1).unwrap();
    let prose = recipes.split("```").next().unwrap();
    let known: BTreeSet<&str> = imports.iter().filter_map(|path| path.rsplit("::").next()).collect();
    // Names after `::` belong to a type.
    let code = code.replace("::", "::_");
    let names = code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| {
        let mut chars = name.chars();
        chars.next().is_some_and(char::is_uppercase) && chars.any(char::is_lowercase)
    });
    for name in names {
        let is_known = known.contains(name) || prose.contains(&format!("{name}`"));
        assert!(is_known, "the README does not import {name}");
    }
}

/// The code of a guide that needs another crate is not compiled there, but in an example.
#[test]
fn code_of_guides_that_is_not_compiled_is_in_an_example() {
    let mut blocks = 0;
    let examples: String = files_of("examples").into_iter().map(|(_, text)| text).collect();
    let lines: BTreeSet<&str> = examples.lines().map(str::trim).collect();
    for (file, text) in guides() {
        for line in rust_blocks(&text, "rust,ignore").into_iter().inspect(|_| blocks += 1).flat_map(str::lines) {
            assert!(lines.contains(line.trim()), "{file}: no example has the line {line:?}");
        }
    }
    assert!(blocks > 0, "the code was found");
}

#[test]
fn readme_names_the_oldest_version_of_rust() {
    let manifest = read("Cargo.toml");
    let version = manifest.split("rust-version = \"").nth(1).unwrap().split('"').next().unwrap();
    assert!(readme().contains(&format!("Rust {version} or later")), "Rust {version}");
}

/// The compiler checks that the pages of links exist, but not that they have the headings.
#[test]
fn links_to_sections_of_guides_lead_to_headings() {
    let guides = guides();
    let anchors = |page: &str| {
        let name = |file: &str| file.trim_end_matches(".md").trim_end_matches(".rs") == page;
        let (_, text) = guides.iter().find(|(file, _)| name(file)).unwrap_or_else(|| panic!("no guide {page}"));
        headings(text)
    };
    let mut count = 0;
    for (file, text) in files_of("src") {
        let page = file.file_stem().unwrap().to_str().unwrap();
        let is_guide = file.parent().is_some_and(|folder| folder.ends_with("guide"));
        let inline = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let defined = text.lines().filter_map(|line| Some(line.strip_prefix('[')?.split_once("]: ")?.1));
        for link in inline.chain(defined) {
            let Some((path, anchor)) = link.split_once('#') else { continue };
            let in_guide = path.strip_prefix("crate::guide::").or(path.strip_prefix("guide::"));
            let target = match in_guide.or(path.strip_prefix("super::")) {
                Some(target) if in_guide.is_some() || is_guide => target,
                None if path.is_empty() && is_guide => page,
                _ => continue,
            };
            assert!(anchors(target).contains(anchor), "{}: {link}", file.display());
            count += 1;
        }
    }
    assert!(count > 50, "the links were found");
}

/// Returns the anchors that rustdoc makes of the headings of a page.
fn headings(text: &str) -> BTreeSet<String> {
    let mut in_code = false;
    let mut headings = BTreeSet::new();
    for line in text.lines().map(|line| line.trim_start_matches("//!").trim_start()) {
        in_code ^= line.starts_with("```");
        if let Some(heading) = line.strip_prefix('#').filter(|_| !in_code) {
            let heading = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            headings.insert(heading.replace(|c: char| !c.is_alphanumeric() && !"-_".contains(c), ""));
        }
    }
    headings
}

/// The guide repeats rows of the table of the memory storage.
#[test]
fn memory_table_of_the_guide_equals_that_of_the_storage() {
    let (guide, measured) = (read("src/guide/sizing.md"), read("src/storage/memory/capacity.md"));
    let table = guide.split("# Memory of the process").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).collect();
    assert!(rows.len() > 4, "the rows were found");
    for row in rows {
        assert!(measured.lines().any(|line| line == row), "{row}");
    }
}

/// A page that names a file that is gone misleads its readers.
#[test]
fn files_that_the_design_names_exist() {
    let design = read("DESIGN.md");
    let roots = ["src", "tests", "examples", "benches", "fuzz", "scripts"];
    let names = design.split('`').skip(1).step_by(2).filter(|span| !span.contains(char::is_whitespace));
    let paths: Vec<&str> =
        names.filter(|name| roots.iter().any(|root| name.starts_with(&format!("{root}/")))).collect();
    assert!(paths.len() > 30, "the paths were found");
    for path in paths {
        assert!(Path::new(ROOT).join(path).exists(), "{path} does not exist");
    }
}

/// docs.rs labels an item with the features of its `cfg`. A label must name a feature that users
/// enable.
#[test]
fn every_feature_is_public_and_documented() {
    let manifest = read("Cargo.toml");
    let features = manifest.split("[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let names: Vec<&str> = features.lines().filter_map(|line| Some(line.split_once(" = [")?.0)).collect();
    assert!(names.contains(&"redis-rustls") && names.len() > 15, "{names:?}");
    for (file, text) in files_of("src") {
        for named in text.split("feature = \"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
            let is_public = names.contains(&named) && !named.starts_with('_');
            assert!(is_public, "{}: docs.rs would show the label {named}", file.display());
        }
    }
    let docs = read("src/lib.rs");
    for name in names.into_iter().filter(|name| *name != "default") {
        assert!(docs.contains(&format!("`{name}`")), "the table of features in src/lib.rs has no {name}");
    }
}

#[test]
fn core_compiles_at_most_the_crates_that_contributing_allows() {
    let contributing = read("CONTRIBUTING.md");
    let allowed = contributing.split("The core compiles at most ").nth(1).and_then(|rest| rest.split(' ').next());
    let allowed: usize = allowed.and_then(|number| number.parse().ok()).expect("CONTRIBUTING.md names the number");
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "-p", "tower-ratelimit", "--no-default-features"])
        .args(["--edges", "normal", "--prefix", "none"])
        .current_dir(ROOT)
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).unwrap();
    // A crate that several others need has a line for each, and ` (*)` at the end of all but one.
    let crates: BTreeSet<&str> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    assert!(crates.len() > 5, "the crates were found");
    assert!(crates.len() <= allowed, "the core compiles {} crates: {crates:?}", crates.len());
}

/// The changelog of the first release is a summary: no earlier version is published.
#[test]
fn changelog_of_the_first_release_has_at_most_ten_lines() {
    let changelog = read("CHANGELOG.md");
    let section = changelog.split("\n## 0.1.0").nth(1).expect("the section exists").split("\n## ").next().unwrap();
    let lines = section.lines().skip(1).filter(|line| !line.is_empty()).count();
    assert!((1..=10).contains(&lines), "{lines} lines");
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

/// Readers of a long page give up.
#[test]
fn guides_have_at_most_2000_words_and_the_design_5000() {
    let design = ("DESIGN.md".to_owned(), read("DESIGN.md"), 5_000);
    let guides = guides().into_iter().filter(|(file, _)| file != "mod.rs").map(|(file, text)| (file, text, 2_000));
    for (file, text, most) in guides.chain([design]) {
        let words = text.split_whitespace().count();
        assert!(words <= most, "{file} has {words} words, at most {most} are allowed; shorten it");
    }
}
