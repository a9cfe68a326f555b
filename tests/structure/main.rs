//! The structure of the sources: modules import lower modules only, no files call each other in a
//! circle, and files and types stay in one piece.

mod calls;
mod choices;
mod imports;
mod left_out;
mod links;
mod readme;
mod workflows;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use self::calls::{Sources, circles};
use self::imports::{Import, imports, paths};

/// The root of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The modules of `src` in layers, lowest first. A module imports only from lower layers and from
/// itself. `lib.rs` imports all of them.
const LAYERS: [&[&str]; 21] = [
    &["error", "time", "key", "sync", "lint"],
    &["text"],
    &["quota"],
    &["strategy"],
    &["decision"],
    &["policy"],
    &["storage", "extract"],
    &["lookup"],
    &["observe"],
    &["reservation"],
    &["waiting"],
    &["limiter"],
    &["rejection", "meter"],
    &["headers"],
    &["middleware"],
    &["future"],
    &["service"],
    &["usage", "in_flight", "client"],
    &["layer"],
    &["serde"],
    &["testing"],
];

/// The modules that decide on limits. They use none of the crates in `NOT_PURE`.
const PURE: [&str; 8] = ["error", "time", "key", "text", "quota", "strategy", "decision", "policy"];
const NOT_PURE: [&str; 8] = ["http", "tokio", "tower_layer", "tower_service", "axum", "tonic", "quanta", "tracing"];
/// Crates of servers, each with the modules that may use it. Extractors read the types that a
/// server attaches to a request. A storage uses tonic as a client.
const SERVERS: [(&str, &[&str]); 2] = [("axum", &["extract", "usage"]), ("tonic", &["extract", "storage"])];

#[test]
fn modules_import_only_lower_modules() {
    for Import { file, from, to } in imports() {
        assert!(!to.is_empty(), "{} imports an item of lib.rs: {from:?}", file.display());
        let (from, to) = (&from[0], &to[0]);
        assert!(to == from || layer(to) < layer(from), "{} imports {to}, which is not lower", file.display());
    }
}

/// An import from `lib.rs` hides the module that it depends on.
#[test]
fn no_module_imports_from_the_face_of_the_crate() {
    for (_, file, code) in sources() {
        let face = paths(without_tests(&code)).into_iter().find(|path| {
            path[0] == "crate" && path.get(1).is_some_and(|name| name.starts_with(|letter: char| letter.is_uppercase()))
        });
        assert_eq!(face, None, "{}", file.display());
    }
}

/// To understand one file of an import cycle, a reader would have to know all of them.
#[test]
fn files_of_a_folder_have_no_import_cycle() {
    // For each folder, the files and folders in it, and those that they import.
    let mut folders: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for Import { from, to, .. } in imports() {
        let depth = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
        let siblings = from.get(depth).zip(to.get(depth)).filter(|_| depth > 0);
        let is_test = from.iter().chain(&to).any(|name| ["tests", "loom"].contains(&&**name));
        if let Some((from_name, to_name)) = siblings.filter(|_| !is_test) {
            let files = folders.entry(from[..depth].to_vec()).or_default();
            files.entry(from_name.clone()).or_default().insert(to_name.clone());
        }
    }
    assert!(folders.len() > 10, "the imports were found");
    for (folder, files) in folders {
        let folder = folder.join("/");
        for start in files.keys() {
            let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
            while let Some(name) = next.pop() {
                let imported = files.get(name).into_iter().flatten();
                next.extend(imported.filter(|name| seen.insert(name.as_str())));
            }
            assert!(!seen.contains(start.as_str()), "{folder}/{start} imports itself through {seen:?}");
        }
    }
}

#[test]
fn deciding_modules_use_no_http_and_no_runtime() {
    for (module, file, code) in sources() {
        for name in NOT_PURE.iter().filter(|_| PURE.contains(&&*module)) {
            assert!(!mentions(&code, name), "{} names {name}", file.display());
        }
        for (name, _) in SERVERS.iter().filter(|(_, modules)| !modules.contains(&&*module)) {
            assert!(!mentions(&code, name), "{} names {name}", file.display());
        }
    }
}

/// To understand one file of a circle, a reader would have to know all of them.
#[test]
fn files_call_each_other_in_no_circle() {
    let calls = Sources::of_library().calls();
    assert!(calls.len() > 100, "the calls were found");
    let mut problems = String::new();
    for (from, to) in circles(&calls) {
        let sites = &calls[&(from.to_owned(), to.to_owned())];
        let sites: Vec<&str> = sites.iter().take(5).map(String::as_str).collect();
        writeln!(problems, "{from}, {}, of {to}", sites.join(", ")).unwrap();
    }
    assert!(problems.is_empty(), "files call each other in a circle:\n{problems}");
}

#[test]
fn methods_of_a_type_are_in_at_most_three_files() {
    for (of, files) in Sources::of_library().files_of_types() {
        assert!(files.len() <= 3, "{} has methods in {files:?}", of.name);
    }
}

#[test]
fn files_have_at_most_400_lines_of_code() {
    for (_, file, code) in sources() {
        let lines = without_tests(&code).lines().filter(|line| !line.trim().is_empty()).count();
        assert!(lines <= 400, "{} has {lines} lines of code; split it", file.display());
    }
}

/// Returns the code before the unit tests. Tests in a file of their own end nothing.
fn without_tests(code: &str) -> &str {
    code.split("#[cfg(test)]\nmod tests {").next().unwrap()
}

fn layer(module: &str) -> usize {
    LAYERS
        .iter()
        .position(|modules| modules.contains(&module))
        .unwrap_or_else(|| panic!("{module} is in no layer of this list"))
}

/// Returns the module, the path and the code without comments of each source file except `lib.rs`.
fn sources() -> Vec<(String, PathBuf, String)> {
    let src = Path::new(ROOT).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    let module = |file: &Path| {
        let inside = file.strip_prefix(&src).unwrap();
        inside.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
    };
    let sources: Vec<_> = files.into_iter().map(|file| (module(&file), without_comments(&file), file)).collect();
    assert!(sources.len() > 20, "the sources were found");
    sources
        .into_iter()
        .filter(|(module, ..)| module != "lib")
        .map(|(module, code, file)| (module, file, code))
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
}

fn without_comments(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

fn mentions(code: &str, name: &str) -> bool {
    let path = format!("{name}::");
    code.match_indices(&path)
        .any(|(at, _)| !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_'))
}
