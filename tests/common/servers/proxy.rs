//! What stands between a client and its server, and does harm.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// What happens to what passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Replies are late by so much.
    Delay(Duration),
    /// The server never sees them.
    SwallowRequests,
    /// The server has executed what it was asked, and the client never hears of it.
    SwallowReplies,
    /// The same, but the connection is closed.
    CutAtReply,
    /// Something is said, which is no reply.
    Garbage,
}

/// Listens on a port of its own until the test's process ends.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    mode: Mode,
    /// Both sides of each connection.
    open: Vec<TcpStream>,
    connections: usize,
}

impl Proxy {
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Mutex::new(Shared { mode: Mode::Pass, open: Vec::new(), connections: 0 }));
        let proxy = Self { port, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // Without a server the client is let go.
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                let mut now = shared.lock().unwrap();
                now.connections += 1;
                now.open.extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                drop(now);
                let (to_server, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let (one, other) = (Arc::clone(&shared), Arc::clone(&shared));
                thread::spawn(move || pass(client, to_server, &one, false));
                thread::spawn(move || pass(server, to_client, &other, true));
            }
        });
        proxy
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn set(&self, mode: Mode) {
        self.shared().mode = mode;
    }

    /// How many connections there have been.
    pub fn connections(&self) -> usize {
        self.shared().connections
    }

    /// Closes all connections.
    pub fn cut(&self) {
        for stream in self.shared().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, shared: &Mutex<Shared>, replies: bool) {
    let mut bytes = [0; 4_096];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        let mode = shared.lock().unwrap().mode;
        let passed = match (mode, replies) {
            (Mode::SwallowReplies, true) | (Mode::SwallowRequests, false) => Ok(()),
            (Mode::CutAtReply, true) => break,
            (Mode::Garbage, true) => to.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            (Mode::Delay(time), true) => {
                thread::sleep(time);
                to.write_all(&bytes[..read])
            }
            _ => to.write_all(&bytes[..read]),
        };
        if passed.is_err() {
            break;
        }
    }
    for stream in [from, to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}
