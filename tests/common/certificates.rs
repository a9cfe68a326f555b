//! Certificates for servers on this machine, created for each test.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The certificate of a server (`ca.pem`, `key.pem`), and one that no server has (`other.pem`).
///
/// [`authority`](Self::authority) adds a private authority (`authority.pem`) that has signed the
/// certificates of a server (`server.pem`, `server-key.pem`) and of a client (`client.pem`,
/// `client-key.pem`).
#[derive(Debug)]
pub struct Certificates(PathBuf);

impl Certificates {
    /// Creates the files in a new folder.
    pub fn create() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (own, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("tower-ratelimit-certificates-{own}-{count}"));
        fs::create_dir_all(&folder).unwrap();
        let files = Self(folder);
        for (name, key) in [("ca.pem", "key.pem"), ("other.pem", "other-key.pem")] {
            files.sign("localhost", "FALSE", [name, key], None);
        }
        files
    }

    /// Also creates the files of a private certificate authority.
    pub fn authority() -> Self {
        let files = Self::create();
        let authority = ["authority.pem", "authority-key.pem"];
        files.sign("authority", "TRUE", authority, None);
        files.sign("localhost", "FALSE", ["server.pem", "server-key.pem"], Some(authority));
        files.sign("app", "FALSE", ["client.pem", "client-key.pem"], Some(authority));
        files
    }

    /// Creates a key and a certificate, which is signed by its own key or by `authority`.
    fn sign(&self, subject: &str, is_authority: &str, names: [&str; 2], authority: Option<[&str; 2]>) {
        let request = format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={subject} \
             -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:{is_authority}"
        );
        let [name, key] = names.map(|name| self.path(name));
        let mut command = Command::new("openssl");
        command.args(request.split_whitespace()).args(["-keyout", &key, "-out", &name]);
        if let Some([certificate, key]) = authority {
            command.args(["-CA", &self.path(certificate), "-CAkey", &self.path(key)]);
        }
        let output = command.output().expect("openssl is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Returns the content of a file.
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
