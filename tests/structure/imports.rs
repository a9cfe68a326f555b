//! The imports between the modules of the library.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{ROOT, collect, without_comments};

/// The path of a module or an item from the root of the crate.
type Names = Vec<String>;

/// An import of one module by another. Imports by the crate's root are left out.
pub(crate) struct Import {
    pub(crate) file: PathBuf,
    pub(crate) from: Names,
    pub(crate) to: Names,
}

/// Returns all imports: the paths that start with `crate`, `super` or `self`, anywhere in the code.
/// A re-exported item counts as an item of its original module.
pub(crate) fn imports() -> Vec<Import> {
    let src = Path::new(ROOT).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    let sources: Vec<_> = files
        .into_iter()
        .map(|file| (module(file.strip_prefix(&src).unwrap()), without_comments(&file), file))
        .collect();
    let modules: BTreeSet<&[String]> = sources.iter().map(|(module, ..)| &**module).collect();
    let reexports: BTreeMap<Names, Names> =
        sources.iter().flat_map(|(module, code, _)| reexports(module, code)).collect();
    assert_eq!(reexports[&["Quota".to_owned()][..]], ["quota", "Quota"]);
    let module_of = |path: Names| {
        let mut path = path;
        // A re-exported item may be a re-export itself.
        while let Some((end, original)) =
            (1..=path.len()).rev().find_map(|end| Some((end, reexports.get(&path[..end])?)))
        {
            path.splice(..end, original.iter().cloned());
        }
        while !modules.contains(&*path) {
            path.pop();
        }
        path
    };
    let mut imports = Vec::new();
    for (module, code, file) in sources.iter().filter(|(module, ..)| !module.is_empty()) {
        let (code, tests) = code.split_once("\nmod tests {").unwrap_or((code, ""));
        for (from, code) in [(module.clone(), code), ([&**module, &["tests".to_owned()]].concat(), tests)] {
            for path in paths(code) {
                let to = module_of(absolute(&from, &path));
                imports.push(Import { file: file.clone(), from: from.clone(), to });
            }
        }
    }
    imports
}

/// Returns the module of a file in `src`.
fn module(file: &Path) -> Names {
    let mut names: Names =
        file.with_extension("").components().map(|name| name.as_os_str().to_str().unwrap().to_owned()).collect();
    names.pop_if(|name| ["mod", "lib"].contains(&&**name));
    names
}

/// Returns the items that a module re-exports, each with its original path. An item with the name of
/// its module, such as `race::race`, counts as the module.
fn reexports(module: &[String], code: &str) -> Vec<(Names, Names)> {
    let uses = code.match_indices(" use ").filter(|(at, _)| {
        let line = code[..*at].rsplit('\n').next().unwrap();
        line.trim_start().starts_with("pub")
    });
    let statements = uses.map(|(at, _)| code[at..].split(';').next().unwrap());
    let paths = statements.flat_map(paths).map(|path| absolute(module, &path));
    paths
        .map(|path| ([module, &path[path.len() - 1..]].concat(), path))
        .filter(|(name, path)| !path.starts_with(name))
        .collect()
}

/// Returns the path from the root of the crate.
fn absolute(module: &[String], path: &[&str]) -> Names {
    let supers = path.iter().take_while(|name| **name == "super").count();
    let parent = match path[0] {
        "crate" => &[],
        _ => &module[..module.len() - supers],
    };
    let names = path[supers.max(1)..].iter().map(|name| (*name).to_owned());
    parent.iter().cloned().chain(names).collect()
}

/// Returns the paths in the code that start with `crate`, `super` or `self`.
pub(crate) fn paths(code: &str) -> Vec<Vec<&str>> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            if !code[..at].ends_with(|before: char| before.is_alphanumeric() || "_:".contains(before)) {
                read_tree(&code[at..], &[], &mut paths);
            }
        }
    }
    paths
}

/// Reads a path or a list of paths after the names `before`. Returns the rest of the text.
fn read_tree<'a>(text: &'a str, before: &[&'a str], paths: &mut Vec<Vec<&'a str>>) -> &'a str {
    let text = text.trim_start();
    if let Some(list) = text.strip_prefix('{') {
        let mut rest = list;
        loop {
            rest = read_tree(rest, before, paths);
            // After a path, `as NAME` may follow.
            rest = &rest[rest.find([',', '}']).expect("a list ends")..];
            match rest.strip_prefix(',') {
                Some(next) => rest = next,
                None => return &rest[1..],
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if name.is_empty() {
        return rest;
    }
    let path = [before, &[name]].concat();
    match rest.strip_prefix("::") {
        Some(next) if next.starts_with(|c: char| c.is_alphabetic() || "_{".contains(c)) => {
            read_tree(next, &path, paths)
        }
        _ => {
            paths.push(path);
            rest
        }
    }
}

#[test]
fn paths_are_read_from_nested_lists() {
    let code = "use crate::{a, b::{c as d, x::{y,\n}}, e::*}; mod_crate::z; super::super::f(self::g::<T>())";
    let joined: Vec<String> = paths(code).iter().map(|path| path.join(" ")).collect();
    assert_eq!(joined, ["crate a", "crate b c", "crate b x y", "crate e", "super super f", "self g"]);
}

#[test]
fn paths_resolve_from_their_module() {
    let module = ["a".to_owned(), "b".to_owned()];
    assert_eq!(absolute(&module, &["super", "super", "c"]), ["c"]);
    assert_eq!(absolute(&module, &["super", "c"]), ["a", "c"]);
    assert_eq!(absolute(&module, &["self", "c", "d"]), ["a", "b", "c", "d"]);
    assert_eq!(absolute(&module, &["crate", "c"]), ["c"]);
}
