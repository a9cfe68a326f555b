//! The README: its examples and links exist, also for readers of the published package.

use std::fs;
use std::path::Path;

use crate::ROOT;

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap()
}

/// Each `cargo run --example NAME` with the text between the name and the end of the command.
fn example_commands(readme: &str) -> Vec<(&str, &str)> {
    let commands = readme.split("cargo run --example ").skip(1).map(|rest| rest.split(['`', '\n']).next().unwrap());
    commands.map(|command| command.split_once(' ').unwrap_or((command, ""))).collect()
}

#[test]
fn examples_of_the_readme_exist_and_name_the_features_they_need() {
    let (readme, manifest) = (read("README.md"), read("examples/Cargo.toml"));
    let commands = example_commands(&readme);
    assert!(commands.len() > 10, "the commands were found");
    for (name, rest) in commands {
        let target = manifest.split("[[example]]").find(|target| target.contains(&format!("name = \"{name}\"")));
        let target = target.unwrap_or_else(|| panic!("examples/Cargo.toml has no example {name}"));
        if let Some(features) = target.split("required-features = [\"").nth(1) {
            let feature = features.split('"').next().unwrap();
            assert!(rest.contains(&format!("--features {feature}")), "{name} needs --features {feature}: {rest}");
        }
    }
}

/// A relative link of the README leads to a file of the published package.
#[test]
fn links_of_the_readme_lead_to_packaged_files() {
    let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
    let include = manifest.split("include = [").nth(1).unwrap().split(']').next().unwrap();
    let links: Vec<&str> = readme.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    assert!(!links.is_empty(), "the links were found");
    for link in links.into_iter().filter(|link| !link.starts_with("https://") && !link.starts_with('#')) {
        assert!(Path::new(ROOT).join(link).is_file(), "{link} does not exist");
        assert!(include.contains(&format!("\"/{link}\"")), "{link} is not in `include` of Cargo.toml");
    }
}
