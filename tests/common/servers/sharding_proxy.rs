//! A proxy that distributes keys to several Redis servers, as twemproxy and Envoy do.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// Listens on its own port until the test process ends.
///
/// The first key of a command selects the server, as with those proxies. A script with several keys
/// runs on the server of its first key.
#[derive(Debug)]
pub struct ShardingProxy {
    port: u16,
    error: Arc<Mutex<Option<&'static str>>>,
}

impl ShardingProxy {
    /// Starts a proxy in front of the servers on these ports. Each entry receives the same share of
    /// the keys, so a port that occurs several times receives several shares.
    pub fn start(servers: &[u16]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let servers: Arc<[u16]> = servers.into();
        let error = Arc::new(Mutex::new(None));
        let instead = Arc::clone(&error);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (servers, instead) = (Arc::clone(&servers), Arc::clone(&instead));
                // The client or a server has closed its connection when `serve` fails.
                thread::spawn(move || drop(serve(&client, &servers, &instead)));
            }
        });
        Self { port, error }
    }

    /// Replies with this error instead of the reply of the server, as if that had not arrived.
    pub fn lose_replies(&self, error: Option<&'static str>) {
        *self.error.lock().unwrap() = error;
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Passes the commands that have arrived to their servers, and the replies to the client in this
/// order.
fn serve(client: &TcpStream, servers: &[u16], error: &Mutex<Option<&'static str>>) -> io::Result<()> {
    let connect = |&port: &u16| TcpStream::connect(("127.0.0.1", port)).map(BufReader::new);
    let mut servers = servers.iter().map(connect).collect::<io::Result<Vec<_>>>()?;
    let (mut requests, mut replies) = (BufReader::new(client), client);
    loop {
        let mut asked = Vec::new();
        while asked.is_empty() || !requests.buffer().is_empty() {
            let mut command = Message::default();
            command.read(&mut requests)?;
            let mut hasher = DefaultHasher::new();
            command.first_key().hash(&mut hasher);
            let index = usize::try_from(hasher.finish() % servers.len() as u64).unwrap();
            servers[index].get_mut().write_all(&command.bytes)?;
            asked.push(index);
        }
        for index in asked {
            let mut reply = Message::default();
            reply.read(&mut servers[index])?;
            let error = *error.lock().unwrap();
            match error {
                Some(error) => write!(replies, "-{error}\r\n")?,
                None => replies.write_all(&reply.bytes)?,
            }
        }
    }
}

/// A command or a reply.
#[derive(Default)]
struct Message {
    bytes: Vec<u8>,
    /// The strings in it.
    strings: Vec<Vec<u8>>,
}

impl Message {
    fn read(&mut self, stream: &mut impl BufRead) -> io::Result<()> {
        let begin = self.bytes.len();
        if stream.read_until(b'\n', &mut self.bytes)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = str::from_utf8(&self.bytes[begin..]).map_err(io::Error::other)?.trim_end();
        let (kind, number) = line.split_at(1);
        let length = number.parse::<i64>().ok().and_then(|length| usize::try_from(length).ok());
        match (kind, length) {
            ("$", Some(length)) => {
                let mut bytes = vec![0; length + 2];
                stream.read_exact(&mut bytes)?;
                self.bytes.extend(&bytes);
                bytes.truncate(length);
                self.strings.push(bytes);
            }
            ("*", Some(length)) => (0..length).try_for_each(|_| self.read(stream))?,
            _ => {}
        }
        Ok(())
    }

    /// Returns the first key of a command: that of a script follows the number of its keys.
    fn first_key(&self) -> Option<&Vec<u8>> {
        let is_script = self.strings.first().is_some_and(|name| name.starts_with(b"EVAL"));
        self.strings.get(if is_script { 3 } else { 1 })
    }
}
