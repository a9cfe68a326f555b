//! The structure of the sources: modules import lower modules only, and files stay small.

mod left_out;
mod readme;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The root of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The modules of `src` in layers, lowest first. A module imports only from lower layers and from
/// itself. `lib.rs` imports all of them.
const LAYERS: [&[&str]; 19] = [
    &["error", "time", "key", "sync", "lint"],
    &["text"],
    &["quota"],
    &["strategy"],
    &["decision"],
    &["policy"],
    &["storage", "extract"],
    &["lookup", "client_usage"],
    &["limiter"],
    &["rejection"],
    &["headers"],
    &["observe"],
    &["middleware"],
    &["future"],
    &["service"],
    &["usage_handler"],
    &["layer"],
    &["serde"],
    &["testing"],
];

/// The modules that decide on limits. They use none of the crates below.
const PURE: [&str; 8] = ["error", "time", "key", "text", "quota", "strategy", "decision", "policy"];
const NOT_PURE: [&str; 8] = ["http", "tokio", "tower_layer", "tower_service", "axum", "tonic", "quanta", "tracing"];
/// Crates of servers, each with the modules that may use it. Extractors read the types that a
/// server attaches to a request. A storage uses tonic as a client.
const SERVERS: [(&str, &[&str]); 2] = [("axum", &["extract", "usage_handler"]), ("tonic", &["extract", "storage"])];

/// The files that import each other in a circle, by folder. Add none: a reader has to know all
/// files of a circle at once.
const CIRCLES: [(&str, &[&str]); 2] = [
    ("storage/memory", &["answer", "decide", "evict", "insert", "small"]),
    // Sentinels are servers with connections of their own.
    ("storage/redis/link", &["node", "sentinel"]),
];

#[test]
fn imports_go_downward() {
    let items = reexports();
    for (module, file, code) in sources() {
        for used in imported_modules(&code, &items) {
            assert!(
                used == module || layer(&used) < layer(&module),
                "{} imports {used}, which is not lower",
                file.display()
            );
        }
    }
}

#[test]
fn files_of_a_folder_do_not_import_each_other() {
    let mut folders: BTreeMap<PathBuf, BTreeMap<String, String>> = BTreeMap::new();
    for (_, file, code) in sources() {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        if !["mod", "tests", "loom"].contains(&&*name) {
            folders.entry(file.parent().unwrap().to_owned()).or_default().insert(name, code);
        }
    }
    folders.remove(&Path::new(ROOT).join("src"));
    for (folder, files) in folders {
        let siblings = |name: &String| {
            let paths = files[name].split("super::").skip(1).flat_map(first_names);
            paths.filter(|path| files.contains_key(*path) && path != name).map(str::to_owned).collect::<Vec<_>>()
        };
        for start in files.keys() {
            let (mut seen, mut next) = (Vec::new(), siblings(start));
            while let Some(name) = next.pop().filter(|_| !seen.contains(start)) {
                if !seen.contains(&name) {
                    next.extend(siblings(&name));
                    seen.push(name);
                }
            }
            let known = |(known, files): &(&str, &[&str])| folder.ends_with(known) && files.contains(&start.as_str());
            assert!(
                !seen.contains(start) || CIRCLES.iter().any(known),
                "{}/{start}.rs imports itself through {seen:?}",
                folder.display()
            );
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

#[test]
fn files_have_at_most_250_lines_of_code() {
    for (_, file, code) in sources() {
        let lines = code.lines().filter(|line| !line.trim().is_empty()).count();
        assert!(lines <= 250, "{} has {lines} lines of code; split it", file.display());
    }
}

fn layer(module: &str) -> usize {
    LAYERS
        .iter()
        .position(|modules| modules.contains(&module))
        .unwrap_or_else(|| panic!("{module} is in no layer of this list"))
}

/// Each source file except `lib.rs`: its module, its path and its code without comments.
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

/// The module of each public item of `lib.rs`.
fn reexports() -> BTreeMap<String, String> {
    let text = without_comments(&Path::new(ROOT).join("src/lib.rs"));
    let mut items = BTreeMap::new();
    for statement in text.split(';').filter_map(|part| part.split("pub use self::").nth(1)) {
        let (module, names) = statement.split_once("::").unwrap();
        for name in words(names) {
            items.insert(name.to_owned(), module.to_owned());
        }
    }
    assert_eq!(items["Quota"], "quota");
    items
}

/// The modules that the code imports by a path from the crate's root or from the parent module.
fn imported_modules(code: &str, items: &BTreeMap<String, String>) -> Vec<String> {
    let mut modules = Vec::new();
    for path in code.split("crate::").skip(1).chain(code.split("super::").skip(1)) {
        for name in first_names(path) {
            let module = items.get(name).map_or(name, String::as_str);
            let known = LAYERS.iter().any(|modules| modules.contains(&module));
            modules.extend(known.then(|| module.to_owned()));
        }
    }
    modules
}

/// The first name of a path, or of each path in a list: `a`, `b` and `d` of `{a, b::{c}, d}`.
fn first_names(path: &str) -> Vec<&str> {
    let Some(list) = path.strip_prefix('{') else { return words(path).take(1).collect() };
    let (mut names, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.extend(words(&list[start..at]).next());
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

#[test]
fn first_names_of_nested_lists_are_read() {
    assert_eq!(first_names("{a, b::{c, x::{y}}, d}; use crate::e;"), ["a", "b", "d"]);
    assert_eq!(first_names("layer as _;"), ["layer"]);
}

fn mentions(code: &str, name: &str) -> bool {
    let path = format!("{name}::");
    code.match_indices(&path)
        .any(|(at, _)| !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_'))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}
