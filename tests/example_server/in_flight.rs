//! Requests in flight, with streams over sockets, and curl as a client that is killed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;

use common::example_process::Server;
use common::random::Numbers;
use common::time::wait_until;

const ENDLESS: &str = "/slow?ms=3600000";

/// A server that admits two streams of a client at once, and any number of requests per hour.
fn server(flags: &[&str]) -> Server {
    Server::start(&[&["--policy", "1000000/hour", "--in-flight", "2"], flags].concat())
}

/// Opens a stream, and waits for its first chunk.
fn stream(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    write!(stream, "GET {ENDLESS} HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    read_until(&mut stream, "chunk");
    stream
}

/// Reads from a stream until it has sent this text.
fn read_until(stream: &mut TcpStream, text: &str) {
    let (mut answer, mut buffer) = (String::new(), [0; 1_024]);
    while !answer.contains(text) {
        let read = stream.read(&mut buffer).unwrap();
        answer.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        assert!(read > 0, "{answer}");
    }
}

/// Waits until two streams can be opened, so that no slot is taken.
fn assert_all_slots_are_free(server: &Server) {
    wait_until("all slots are free", || {
        // The request itself takes one.
        server.get("/", "").1.contains("\"in-flight\";r=1")
    });
}

#[test]
fn third_stream_is_refused_until_another_one_has_ended() {
    let server = server(&["--headers", "draft11"]);
    let streams = [stream(&server), stream(&server)];
    let (status, head) = server.get("/", "");
    assert!(status == 429 && head.contains("retry-after: 1\r\n"), "{head}");
    assert!(head.contains("\"in-flight\";q=2;qu=\"concurrent-requests\""), "{head}");
    drop(streams);
    assert_all_slots_are_free(&server);
    let short = server.get("/slow?ms=200", "");
    assert_eq!(short.0, 200);
    assert_all_slots_are_free(&server);
}

#[test]
fn clients_have_slots_of_their_own_and_costs_take_several() {
    let server = server(&["--key", "header:x-user", "--cost-header", "x-cost"]);
    assert_eq!(server.status("/", "x-user: a\r\nx-cost: 3\r\n"), 429);
    assert_eq!(server.status("/", "x-user: a\r\nx-cost: 2\r\n"), 200);
    assert_eq!(server.status("/", "x-cost: 1\r\n"), 400);
}

fn curl(server: &Server) -> Child {
    let url = format!("http://{}{ENDLESS}", server.address());
    Command::new("curl").args(["-sN", &url]).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn killed_curl_gives_its_slot_back() {
    let server = server(&["--headers", "draft11"]);
    for _ in 0..5 {
        let mut clients = [curl(&server), curl(&server)];
        for client in &mut clients {
            let mut chunk = [0; 6];
            client.stdout.as_mut().unwrap().read_exact(&mut chunk).unwrap();
            assert_eq!(&chunk, b"chunk\n");
        }
        assert_eq!(server.status("/", ""), 429);
        for mut client in clients {
            client.kill().unwrap();
            client.wait().unwrap();
        }
        assert_all_slots_are_free(&server);
    }
}

#[test]
fn graceful_shutdown_waits_for_streams_in_flight() {
    let mut server = server(&[]);
    let url = format!("http://{}/slow?ms=2000", server.address());
    let mut client = Command::new("curl").args(["-sN", &url]).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = client.stdout.take().unwrap();
    output.read_exact(&mut [0; 6]).unwrap();
    assert!(server.terminate().success());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "chunk\n".repeat(19));
    assert!(client.wait().unwrap().success());
}

#[test]
fn shadow_mode_refuses_no_stream() {
    let server = server(&["--shadow"]);
    let _streams = [stream(&server), stream(&server), stream(&server)];
    assert_eq!(server.status("/", ""), 200);
}

/// Sends a request or a part of it, reads a part of the response, and disconnects.
fn abort(server: &Server, numbers: &mut Numbers) {
    let path = numbers.one_of(&[ENDLESS, ENDLESS, ENDLESS, "/slow?ms=0", "/"]);
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let phase = numbers.below(16);
    let sent = if phase < 4 { usize::try_from(numbers.below(request.len() as u64)).unwrap() } else { request.len() };
    stream.write_all(&request.as_bytes()[..sent]).unwrap();
    match phase {
        8 | 9 => read_until(&mut stream, "HTTP/1.1 200"),
        10..=13 => read_until(&mut stream, "\r\n\r\n"),
        14 if path == ENDLESS => read_until(&mut stream, "chunk"),
        15 if path == ENDLESS => read_until(&mut stream, "chunk\n\r\n6\r\nchunk"),
        _ => {}
    }
}

#[test]
fn ten_thousand_aborted_streams_leave_no_slot_in_use() {
    const CLIENTS: u64 = 40;
    // A server that has not noticed yet that clients have left still admits others.
    let server = Server::start(&["--policy", "1000000/hour", "--in-flight", "10001", "--headers", "draft11"]);
    thread::scope(|scope| {
        for client in 1..=CLIENTS {
            let server = &server;
            scope.spawn(move || {
                let mut numbers = Numbers(20_261_125 * client);
                (0..10_000 / CLIENTS).for_each(|_| abort(server, &mut numbers));
            });
        }
    });
    let free = |server: &Server| server.get("/", "").1.contains("\"in-flight\";r=10000");
    wait_until("all slots are free", || free(&server));
    let _one = stream(&server);
    assert!(!free(&server), "a stream takes a slot");
}
