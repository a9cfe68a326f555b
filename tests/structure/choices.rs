//! Choices: everything that a layer takes is created in the same way, and the tables of the guides
//! show the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::pages::guides;

use crate::{ROOT, sources};

/// `ClientIp` has two constructors, whose names state which proxies it trusts.
const OTHER_CONSTRUCTORS: [&str; 1] = ["ClientIp"];

/// Returns the public extractors and rejections that a caller creates.
fn types() -> BTreeSet<String> {
    let mut types = BTreeSet::new();
    for (_, _, code) in sources() {
        for implementation in ["KeyExtractor for ", "Rejection<B> for "] {
            let names =
                code.split(implementation).skip(1).map(|rest| rest.split([' ', '<', '\n']).next().unwrap().to_owned());
            // `KeyExtractor::and` and `or` create these.
            let is_wrapper = |name: &str| ["F", "Arc", "Box", "Or", "And"].contains(&name);
            types.extend(names.filter(|name| !is_wrapper(name)));
        }
    }
    assert!(types.contains("PeerIp") && types.contains("GrpcRejection") && types.len() >= 12, "{types:?}");
    types
}

/// Returns the code of the sources, their docs, the guides and the examples.
fn shown_code() -> Vec<(String, String)> {
    let mut files = guides();
    let mut folders = vec![Path::new(ROOT).join("src"), Path::new(ROOT).join("examples")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                files.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.push(("README.md".to_owned(), fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap()));
    files
}

/// Guards against this defect: `PeerIp::new()` and `Global` compile, but `PeerIp` and
/// `Global::new()` do not.
#[test]
fn every_extractor_and_rejection_has_a_constructor_new() {
    let code: String = sources().into_iter().map(|(_, _, code)| code).collect();
    for name in types() {
        let mut blocks = code.split("\nimpl").skip(1).map(|block| block.split("\n}").next().unwrap());
        let is_own = |block: &str| {
            let head = block.split('{').next().unwrap();
            !head.contains(" for ") && head.split(['<', ' ']).any(|word| word == name)
        };
        let has_new = blocks.any(|block| is_own(block) && block.contains("fn new"));
        assert_eq!(has_new, !OTHER_CONSTRUCTORS.contains(&&*name), "{name}");
    }
}

#[test]
fn docs_and_examples_create_extractors_and_rejections_by_new() {
    for name in types() {
        for (file, text) in shown_code() {
            for bare in [format!(", {name})"), format!("({name})"), format!("({name}, "), format!("({name}.")] {
                assert!(!text.contains(&bare), "{file}: {bare} without ::new()");
            }
        }
    }
}
