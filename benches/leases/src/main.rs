//! Measures how much leases spend and save with each strategy. See `scripts/leases`.

mod bounds;
#[allow(dead_code, unreachable_pub, clippy::pedantic, reason = "the tests use all of it")]
#[path = "../../../tests/common/fleets/mod.rs"]
mod fleets;
mod load;
#[allow(dead_code, reason = "another program uses the rest")]
#[path = "../../support/picture.rs"]
mod picture;
mod process;
#[allow(dead_code, unreachable_pub, clippy::pedantic, reason = "the tests use all of it")]
#[path = "../../../tests/common/random.rs"]
mod random;
#[allow(dead_code, reason = "another program uses the rest")]
#[path = "../../redis/src/server.rs"]
mod server;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["picture", file] => bounds::draw(file),
        ["figures"] => load::print(),
        // This program starts itself as one of eight processes.
        ["process", url, limiter, load] => process::run(url, limiter, load),
        _ => panic!("name `picture FILE` or `figures`"),
    }
}
