//! The links of the README and the guides work for rustdoc, on a forge and on a registry's page.
//! `scripts/links` checks that their targets exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use common::pages::{guides, readme};

use crate::ROOT;

/// The address of the documentation, without the path of an item.
const DOCS: &str = "https://docs.rs/tower-ratelimit/latest/tower_ratelimit/";
const STD: &str = "https://doc.rust-lang.org/";

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap()
}

/// Returns the value of a field of Cargo.toml.
fn field(name: &str) -> String {
    let (manifest, start) = (read("Cargo.toml"), format!("{name} = \""));
    let value = manifest.lines().find_map(|line| line.strip_prefix(&start));
    value.unwrap_or_else(|| panic!("Cargo.toml has no {name}")).trim_end_matches('"').to_owned()
}

fn markdown_guides() -> Vec<(String, String)> {
    guides().into_iter().filter(|(file, _)| file != "mod.rs").collect()
}

/// Returns the definitions of a page's links, by their label.
fn definitions(page: &str) -> BTreeMap<&str, &str> {
    page.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ")).collect()
}

/// Returns a page without its blocks of code and its definitions.
fn prose(page: &str) -> String {
    let mut in_code = false;
    let is_prose = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        let is_definition = line.starts_with('[') && line.contains("]: ");
        !(in_code || is_fence || is_definition)
    };
    page.lines().filter(is_prose).collect::<Vec<_>>().join("\n")
}

/// Returns the labels that a page uses: `[text][label]`, and the short form of an item.
fn labels(prose: &str) -> BTreeSet<String> {
    let full = prose.split("][").skip(1);
    let mut labels: BTreeSet<String> = full.map(|rest| rest.split(']').next().unwrap().to_owned()).collect();
    for (at, _) in prose.match_indices("[`") {
        let Some((name, after)) = prose[at + 2..].split_once("`]") else { continue };
        if !after.starts_with(['[', '(']) && !name.contains('`') {
            labels.insert(format!("`{name}`"));
        }
    }
    labels
}

/// Returns the path in Rust of the target of a guide's link, or `None` if it is a file of the repository.
fn path_of(target: &str) -> Option<String> {
    if target.starts_with(&field("repository")) {
        return None;
    }
    let (page, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if let Some(guide) = page.strip_suffix(".md") {
        format!("crate::guide::{guide}")
    } else {
        let own = page.strip_prefix(DOCS).map(|page| format!("crate/{page}"));
        let page = own.or_else(|| Some(page.strip_prefix(STD)?.to_owned()))?;
        let (module, file) = page.strip_suffix(".html")?.rsplit_once('/')?;
        let item = file.split_once('.').map(|(_, name)| format!("::{name}")).unwrap_or_default();
        module.replace('/', "::") + &item
    };
    Some(match anchor.split_once('.') {
        Some((_, member)) => format!("{path}::{member}"),
        None if anchor.is_empty() => path,
        None => format!("{path}#{anchor}"),
    })
}

#[test]
fn each_label_of_a_guide_is_defined_at_its_end() {
    for (file, text) in markdown_guides() {
        let (definitions, prose) = (definitions(&text), prose(&text));
        for inline in ["](crate::", "](super", "](std::"] {
            assert!(!prose.contains(inline), "{file}: a forge cannot resolve {inline}; write [text][label]");
        }
        let used = labels(&prose);
        for label in &used {
            assert!(definitions.contains_key(&**label), "{file}: add `[{label}]: {DOCS}...` at the end");
        }
        for label in definitions.keys() {
            assert!(used.contains(*label), "{file}: no link uses the definition of [{label}]");
        }
    }
}

/// rustdoc takes the definitions of `links.md`, and checks them.
#[test]
fn links_md_has_the_same_targets_as_the_guides() {
    let guides = markdown_guides();
    let all = guides.iter().flat_map(|(_, text)| definitions(text));
    let expected: BTreeSet<String> =
        all.filter_map(|(label, target)| Some(format!("[{label}]: {}", path_of(target)?))).collect();
    let links = read("src/guide/links.md");
    let written: BTreeSet<String> = links.lines().map(str::to_owned).collect();
    assert!(written.len() > 100, "the links were found");
    let missing: Vec<_> = expected.difference(&written).collect();
    let extra: Vec<_> = written.difference(&expected).collect();
    assert!(missing.is_empty() && extra.is_empty(), "src/guide/links.md: add {missing:#?}, remove {extra:#?}");
}

/// On docs.rs, the name of the module is above the title.
#[test]
fn guides_begin_with_their_only_title() {
    for (file, text) in markdown_guides() {
        let prose = prose(&text);
        let titles: Vec<&str> = prose.lines().filter(|line| line.starts_with("# ")).collect();
        assert_eq!(titles, [text.lines().next().unwrap()], "{file}: sections begin with ##");
    }
}

/// rustdoc hides lines that begin with `# `, but a forge shows them.
#[test]
fn code_of_guides_has_no_hidden_lines() {
    let pages = markdown_guides().into_iter().chain([("README.md".to_owned(), readme())]);
    for (file, text) in pages {
        let blocks = text.split("\n```").skip(1).step_by(2);
        // rustdoc takes a block without a language for Rust, too.
        let is_rust = |block: &&str| block.starts_with("rust") || block.starts_with('\n');
        for line in blocks.filter(is_rust).flat_map(str::lines) {
            let line = line.trim_start();
            assert!(line != "#" && !line.starts_with("# "), "{file}: write a whole program instead of hiding {line:?}");
        }
    }
}

/// Returns the texts that can name the repository: Markdown, workflows, and the library's sources.
fn texts() -> Vec<(PathBuf, String)> {
    let root = Path::new(ROOT);
    let (mut texts, mut folders) = (Vec::new(), vec![root.join("src"), root.join(".github")]);
    let mut paths: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.is_file());
    while let Some(folder) = folders.pop() {
        let (inner, files): (Vec<_>, Vec<_>) =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).partition(|path| path.is_dir());
        folders.extend(inner);
        paths.extend(files);
    }
    for path in paths {
        texts.extend(fs::read_to_string(&path).ok().map(|text| (path, text)));
    }
    texts
}

/// To move the repository, change Cargo.toml, and replace the address that this test names.
#[test]
fn addresses_of_the_repository_agree_with_cargo_toml() {
    let repository = field("repository");
    let own = repository.strip_prefix("https://github.com/").expect("the repository is on GitHub");
    let mut count = 0;
    for (file, text) in texts() {
        for host in ["github.com/", "raw.githubusercontent.com/"] {
            for rest in text.split(host).skip(1) {
                let address: String = rest.split('/').take(2).collect::<Vec<_>>().join("/");
                let address = address.split(|c: char| !c.is_alphanumeric() && !"/-_.".contains(c)).next().unwrap();
                if address.ends_with("/tower-ratelimit") {
                    assert_eq!(address, own, "{}: replace {address} by {own}", file.display());
                    count += 1;
                }
            }
        }
    }
    assert!(count > 3, "the addresses were found");
    assert!(DOCS.starts_with(&format!("{}/", field("documentation"))), "the address of the documentation");
    assert!(field("homepage").starts_with(DOCS), "the homepage is the page of the guides");
}

/// Returns the addresses of files of the repository in the library's sources, each with its place.
fn files_on_the_forge() -> Vec<(PathBuf, String)> {
    let start = format!("{}/blob/main/", field("repository"));
    let in_text = |(place, text): (PathBuf, String)| {
        let rests: Vec<String> = text.split(&start).skip(1).map(str::to_owned).collect();
        rests.into_iter().map(move |rest| {
            let path = rest.split(|c: char| c.is_whitespace() || ")]>`#".contains(c)).next().unwrap();
            (place.clone(), path.to_owned())
        })
    };
    let src = Path::new(ROOT).join("src");
    texts().into_iter().filter(|(place, _)| place.starts_with(&src)).flat_map(in_text).collect()
}

#[test]
fn files_of_the_repository_that_the_docs_link_to_exist() {
    let files = files_on_the_forge();
    assert!(files.len() > 40, "the links were found");
    for (place, path) in files {
        assert!(Path::new(ROOT).join(&path).is_file(), "{} links to {path}, which does not exist", place.display());
    }
}

/// The examples are not in the package, so a reader of docs.rs needs a link to each of them.
#[test]
fn commands_and_the_list_of_examples_link_to_their_sources() {
    let (manifest, repository) = (read("examples/Cargo.toml"), field("repository"));
    let examples: BTreeMap<&str, &str> = manifest
        .split("[[example]]\nname = \"")
        .skip(1)
        .filter_map(|rest| Some((rest.split('"').next()?, rest.split("path = \"").nth(1)?.split('"').next()?)))
        .collect();
    assert!(examples.len() > 10, "the examples were found");
    let list = read("src/guide/mod.rs");
    for (name, path) in &examples {
        let link = format!("[`{name}`]({repository}/blob/main/examples/{path})");
        assert!(list.contains(&link), "src/guide/mod.rs: add {link} to the examples");
    }
    for (file, text) in markdown_guides() {
        let (definitions, prose) = (definitions(&text), prose(&text));
        for (at, command) in prose.match_indices("`cargo run --example ") {
            let rest = &prose[at + command.len()..];
            let name = rest.split(['`', ' ']).next().unwrap();
            let path = format!("examples/{}", examples[name]);
            let is_linked = prose[..at].ends_with('[')
                && rest.split_once('`').is_some_and(|(_, after)| after.starts_with(&format!("][{path}]")));
            assert!(is_linked, "{file}: write the command of {name} as [`cargo run ..`][{path}]");
            assert_eq!(definitions[&*path], format!("{repository}/blob/main/{path}"), "{file}");
        }
    }
}

/// Relative links are dead on docs.rs, and in the program that shows a README without its files.
#[test]
fn links_of_the_readme_are_absolute_and_lead_to_packaged_files() {
    let (readme, manifest, repository) = (readme(), read("Cargo.toml"), field("repository"));
    let include = manifest.split("include = [").nth(1).unwrap().split(']').next().unwrap();
    let raw = repository.replace("github.com", "raw.githubusercontent.com");
    let links: Vec<&str> = readme.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    let mut count = 0;
    for link in &links {
        assert!(link.starts_with("https://"), "write an absolute address instead of {link}");
        let prefixes = [format!("{repository}/blob/main/"), format!("{raw}/main/")];
        if let Some(file) = prefixes.iter().find_map(|prefix| link.strip_prefix(prefix.as_str())) {
            assert!(Path::new(ROOT).join(file).is_file(), "{file} does not exist");
            let is_packaged = |path: &Path| include.contains(&format!("\"/{}\"", path.display()));
            assert!(Path::new(file).ancestors().any(is_packaged), "{file} is not in `include` of Cargo.toml");
            count += 1;
        }
    }
    assert!(count >= 3, "the links were found");
    for (file, _) in markdown_guides() {
        let page = format!("{DOCS}guide/{}/index.html", file.trim_end_matches(".md"));
        assert!(links.contains(&&*page), "README.md has no link to {page}");
    }
}
