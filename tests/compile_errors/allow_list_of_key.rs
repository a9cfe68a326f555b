//~ `Header` does not return the address of the client
//~ expected `PeerIp::new()`, or `ClientIp::behind([..])?` behind proxies

use tower_ratelimit::extract::AllowList;
use tower_ratelimit::{Header, PeerIp, Quota, RateLimitLayer};

fn main() {
    let list = AllowList::new(Header::new("x-forwarded-for")).allow("10.0.0.0/8");
    let _ = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).allow_list(list);
}
