//! The workflows of CI: actions are pinned, no credentials are stored, and no job hangs for hours.

use std::fs;
use std::path::Path;

use crate::ROOT;

/// Returns the name and the text of each workflow.
fn workflows() -> Vec<(String, String)> {
    let folder = Path::new(ROOT).join(".github/workflows");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let workflows: Vec<_> = files.map(|file| (file.display().to_string(), fs::read_to_string(file).unwrap())).collect();
    assert!(workflows.len() >= 2, "the workflows were found");
    workflows
}

/// Returns the steps of a workflow, and the text before the first one.
fn steps(workflow: &str) -> impl Iterator<Item = &str> {
    workflow.split("\n      - ")
}

/// The owner of an action can move a tag, but not a commit.
#[test]
fn actions_are_pinned_to_commits_with_their_version() {
    let mut count = 0;
    for (file, text) in workflows() {
        for line in text.lines().filter(|line| line.contains("uses: ")) {
            let (commit, version) =
                line.split_once('@').and_then(|(_, pin)| pin.split_once(" # v")).unwrap_or_default();
            let is_commit = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
            let is_version = version.starts_with(|digit: char| digit.is_ascii_digit());
            assert!(is_commit && is_version, "{file}: write `uses: OWNER/NAME@COMMIT # vVERSION`: {line}");
            count += 1;
        }
    }
    assert!(count > 10, "the actions were found");
}

/// A stored token is readable by every later step, among them the build scripts of dependencies.
#[test]
fn checkouts_store_no_credentials() {
    for (file, text) in workflows() {
        let mut checkouts = steps(&text).filter(|step| step.contains("uses: actions/checkout@")).peekable();
        assert!(checkouts.peek().is_some(), "{file}: the checkouts were found");
        for step in checkouts {
            assert!(step.contains("persist-credentials: false"), "{file}: {step}");
        }
    }
}

/// A branch or a title can contain shell code, and an expression would paste it into the script.
#[test]
fn scripts_of_steps_contain_no_expression() {
    let mut count = 0;
    for (file, text) in workflows() {
        for step in steps(&text) {
            let Some(script) = step.split("run: ").nth(1) else { continue };
            let script = script.split("\n        env:").next().unwrap();
            assert!(!script.contains("${{"), "{file}: pass the value by `env`: {step}");
            count += 1;
        }
    }
    assert!(count > 10, "the scripts were found");
}

#[test]
fn jobs_have_a_timeout_and_workflows_read_only_rights() {
    for (file, text) in workflows() {
        assert!(text.contains("\npermissions:\n  contents: read\n"), "{file}: the rights");
        let jobs = text.matches("\n    runs-on: ").count();
        assert!(jobs > 0, "{file}: the jobs were found");
        assert_eq!(text.matches("\n    timeout-minutes: ").count(), jobs, "{file}: each job needs a timeout");
    }
}

/// A job that no longer runs a check would pass.
#[test]
fn workflows_run_the_scripts_that_contributing_names() {
    let all: String = workflows().into_iter().map(|(_, text)| text).collect();
    let contributing = fs::read_to_string(Path::new(ROOT).join("CONTRIBUTING.md")).unwrap();
    for script in [".ci/run", "scripts/workspaces", "scripts/fuzz", "scripts/coverage", "scripts/release"] {
        assert!(all.contains(&format!("run: {script}")), "no job runs {script}");
        assert!(contributing.contains(&format!("`{script}")), "CONTRIBUTING.md does not name {script}");
    }
    assert!(all.contains("RUSTDOCFLAGS: --cfg docsrs -D warnings"), "no job builds the docs as docs.rs does");
}
