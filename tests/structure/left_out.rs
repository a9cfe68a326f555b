//! Prints the groups of tests that this run omits.

#[cfg(not(all(
    feature = "grpc",
    feature = "laws",
    feature = "metrics",
    feature = "partition-key",
    feature = "servers"
)))]
#[test]
fn run_without_all_features_prints_the_omitted_tests() {
    use std::io::Write;

    let left_out = [
        (cfg!(feature = "servers"), "Redis, Valkey, memcached, etcd, PostgreSQL and SQLite"),
        (cfg!(feature = "grpc"), "gRPC"),
        (cfg!(feature = "metrics"), "metrics"),
        (cfg!(feature = "partition-key"), "partition keys"),
        (cfg!(feature = "laws"), "the law suites"),
    ];
    let left_out: Vec<&str> = left_out.into_iter().filter(|(enabled, _)| !enabled).map(|(_, tests)| tests).collect();
    // `eprintln!` is not used, because the test harness captures its output.
    writeln!(std::io::stderr(), "left out: the tests of {}. To run all tests: scripts/test", left_out.join(", "))
        .unwrap();
    let all = std::fs::read_to_string(std::path::Path::new(crate::ROOT).join("scripts/test")).unwrap();
    assert!(all.contains("--all-features"), "scripts/test runs all tests");
}
