//! A TCP proxy between a client and its server, which injects network faults.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// The first bytes of a connection to PostgreSQL that only cancels a statement.
const CANCEL_REQUEST: [u8; 8] = [0, 0, 0, 16, 0x04, 0xd2, 0x16, 0x2e];

/// The fault that the proxy injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Each reply is delayed by this duration.
    Delay(Duration),
    /// The server does not receive the requests.
    SwallowRequests,
    /// The server executes the requests, but the client does not receive the replies.
    SwallowReplies,
    /// Like `SwallowReplies`, but the connection is closed when the server replies.
    CutAtReply,
    /// Replies are replaced by bytes of another protocol.
    Garbage,
}

/// Listens on its own port until the test process ends.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    mode: Mode,
    /// The number of replies that pass before `mode` applies.
    unharmed: usize,
    /// Both sides of each connection.
    open: Vec<TcpStream>,
    connections: usize,
    /// The number of accepted connections whose client has neither sent a byte nor left.
    silent: usize,
    attempts: usize,
    /// The address of a connection by [`Proxy::counted`], which is not counted.
    own: Option<SocketAddr>,
}

impl Shared {
    /// Returns the mode for the bytes that were just read, of a reply or of a request.
    fn next_mode(&mut self, is_reply: bool) -> Mode {
        if self.unharmed == 0 {
            return self.mode;
        }
        self.unharmed -= usize::from(is_reply);
        Mode::Pass
    }
}

impl Proxy {
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let fresh = Shared {
            mode: Mode::Pass,
            unharmed: 0,
            open: Vec::new(),
            connections: 0,
            silent: 0,
            attempts: 0,
            own: None,
        };
        let shared = Arc::new(Mutex::new(fresh));
        let proxy = Self { port, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut now = shared.lock().unwrap();
                if now.own.is_some() && now.own == client.peer_addr().ok() {
                    continue;
                }
                now.attempts += 1;
                drop(now);
                // Without a server, the client's connection is closed.
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                let mut now = shared.lock().unwrap();
                now.open.extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                now.silent += 1;
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

    pub fn set(&self, mode: Mode) {
        self.set_after(0, mode);
    }

    /// Passes this many more replies, then sets the mode.
    ///
    /// Each read from the server counts as one reply, so the caller must send one request at a
    /// time.
    pub fn set_after(&self, replies: usize, mode: Mode) {
        let mut shared = self.shared();
        (shared.mode, shared.unharmed) = (mode, replies);
    }

    /// Returns the number of connections through to the server that have sent a request, without
    /// those that only cancel a statement.
    pub fn connections(&self) -> usize {
        self.counted().connections
    }

    /// Returns the number of connections from clients, even if the server was down.
    pub fn attempts(&self) -> usize {
        self.counted().attempts
    }

    /// Closes all connections.
    pub fn cut(&self) {
        for stream in self.shared().open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits until the proxy has accepted all connections that were opened before, and has read their first
    /// bytes. It accepts them in order, and closes the one of this method. Waits for the bytes for at most a
    /// tenth of a second, because some clients stay silent.
    fn counted(&self) -> MutexGuard<'_, Shared> {
        let mut own = {
            let mut shared = self.shared();
            let own = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
            shared.own = own.local_addr().ok();
            own
        };
        let _ = own.read(&mut [0]);
        self.shared().own = None;
        let begun = Instant::now();
        while self.shared().silent > 0 && begun.elapsed() < Duration::from_millis(100) {
            thread::sleep(Duration::from_millis(5));
        }
        self.shared()
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
    // Large enough for all replies that arrive during a delay.
    let mut bytes = vec![0; 65_536];
    let mut is_counted = replies;
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        if !is_counted {
            let mut shared = shared.lock().unwrap();
            shared.connections += usize::from(!bytes[..read].starts_with(&CANCEL_REQUEST));
            shared.silent -= 1;
        }
        is_counted = true;
        let mode = shared.lock().unwrap().next_mode(replies);
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
    if !is_counted {
        shared.lock().unwrap().silent -= 1;
    }
    for stream in [from, to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}
