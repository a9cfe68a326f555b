//~ ClientIp::behind

use tower_ratelimit::ClientIp;

fn main() {
    let _ = ClientIp::new(["10.0.0.0/8"]);
}
