//! Ports for servers.

use std::net::{TcpListener, UdpSocket};
use std::sync::{Mutex, PoisonError};

/// The ports are below those that the system uses for outgoing connections (from 32,768 on Linux).
/// So no connection takes the port of a server that a test has stopped.
const FIRST: u16 = 11_000;

/// A test process leases this many ports at a time.
const LEASED: u16 = 100;

/// The number of leases. The ports of the cluster bus follow, up to 30,999.
const LEASES: u16 = 100;

/// The distance between the port of a Redis server and the port of its cluster bus.
const BUS: u16 = 10_000;

/// The leases of this process. No other process can bind their sockets.
static LEASE: Mutex<Lease> = Mutex::new(Lease { held: Vec::new(), next: 0, end: 0 });

struct Lease {
    held: Vec<UdpSocket>,
    next: u16,
    end: u16,
}

/// Returns a free port, which no other call returns. The port 10,000 above, which the cluster bus
/// uses, is free too.
///
/// # Panics
///
/// Panics if other test processes have leased all ports.
pub fn free_port() -> u16 {
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut lease = LEASE.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if lease.next == lease.end {
            lease.extend();
        }
        let port = lease.next;
        lease.next += 1;
        if is_free(port) && is_free(port + BUS) {
            return port;
        }
    }
}

impl Lease {
    fn extend(&mut self) {
        // Processes that start together begin at different leases.
        let own = u16::try_from(std::process::id() % u32::from(LEASES)).unwrap();
        let mut firsts = (0..LEASES).map(|step| FIRST + (own + step) % LEASES * LEASED);
        let leased = firsts.find_map(|first| Some((UdpSocket::bind(("127.0.0.1", first)).ok()?, first)));
        let (socket, first) = leased.expect("a range of ports that no other test process has leased");
        self.held.push(socket);
        (self.next, self.end) = (first, first + LEASED);
    }
}
