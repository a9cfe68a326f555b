//! Certificates for servers on this machine, created for each test.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A CA (`ca.pem`, `key.pem`), and another CA that signed nothing (`other.pem`).
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
            let request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost \
                           -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE";
            let (key, name) = (files.path(key), files.path(name));
            let output = Command::new("openssl")
                .args(request.split_whitespace())
                .args(["-keyout", &key, "-out", &name])
                .output();
            let output = output.expect("openssl is installed");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        files
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
