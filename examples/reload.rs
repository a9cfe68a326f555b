//! Limits in a file, which is read again at SIGHUP and when its content changes.
//!
//! All limits change together or not at all. If the file is invalid, the old limits stay.
//!
//! ```text
//! printf 'api = "10/minute"\nlogin = "5/minute"\n' > limits.toml
//! cargo run --example reload -- limits.toml
//! curl -i http://127.0.0.1:3000/
//! printf 'api = "20/minute"\nlogin = "3/minute"\n' > limits.toml
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};
use tower_ratelimit::{LivePolicy, PeerIp, Policy, RateLimitLayer};

/// The limits in the file. A file that is half written lacks one, and is invalid.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    api: Policy,
    login: Policy,
}

impl Limits {
    fn parse(text: &str) -> Result<Self, Box<dyn Error>> {
        let Self { api, login } = toml::from_str(text)?;
        // A named policy keeps the spent units when its amount changes.
        Ok(Self { api: api.try_with_name("api")?, login: login.try_with_name("login")? })
    }
}

/// The limits of the app.
#[derive(Clone)]
struct LiveLimits {
    api: LivePolicy,
    login: LivePolicy,
}

impl LiveLimits {
    fn new(Limits { api, login }: Limits) -> Self {
        Self { api: LivePolicy::new(api), login: LivePolicy::new(login) }
    }

    fn change(&self, text: &str) -> Result<(), Box<dyn Error>> {
        let new = Limits::parse(text)?;
        Ok(LivePolicy::set_all([(&self.api, new.api), (&self.login, new.login)])?)
    }

    /// Reads the file at SIGHUP and at each interval. If the content is not `last`, changes the
    /// limits.
    async fn follow(self, file: PathBuf, last: String, interval: Duration) {
        let mut last = Ok(last);
        loop {
            tokio::select! { () = hangup() => {}, () = tokio::time::sleep(interval) => {} }
            let content = read(&file).await;
            if content != last {
                last = content;
                match last.as_deref().map_err(|error| error.as_str().into()).and_then(|text| self.change(text)) {
                    Ok(()) => tracing::info!("limits changed"),
                    Err(error) => tracing::warn!(error, "cannot change the limits, the old ones stay"),
                }
            }
        }
    }
}

async fn read(file: &Path) -> Result<String, String> {
    let file = file.to_owned();
    let read = tokio::task::spawn_blocking(|| std::fs::read_to_string(file)).await;
    read.expect("reading does not panic").map_err(|error| error.to_string())
}

/// Completes at the next SIGHUP, which exists on Unix only.
async fn hangup() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        signal(SignalKind::hangup()).expect("SIGHUP can be listened for").recv().await;
    }
    #[cfg(not(unix))]
    std::future::pending::<()>().await;
}

fn app(limits: &LiveLimits) -> Router {
    let limit = |policy: &LivePolicy| RateLimitLayer::new(policy.clone(), PeerIp::new());
    Router::new()
        .route("/login", post(|| async { "welcome" }).layer(limit(&limits.login)))
        .route("/", get(|| async { "hello" }))
        .layer(limit(&limits.api))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().init();
    let file = PathBuf::from(std::env::args().nth(1).ok_or("name the file with the limits")?);
    let text = read(&file).await?;
    let limits = LiveLimits::new(Limits::parse(&text)?);
    let app = app(&limits);
    tokio::spawn(limits.follow(file, text, Duration::from_secs(1)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tokio::time::sleep;
    use tower::ServiceExt;

    use super::*;

    const OLD: &str = "api = \"10/minute\"\nlogin = \"5/minute\"";
    const NEW: &str = "api = \"20/minute\"\nlogin = \"3/minute\"";
    const POLL: Duration = Duration::from_millis(20);

    async fn limit(app: &Router) -> String {
        let mut request = Request::get("/").body(Body::empty()).unwrap();
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 1234)));
        let response = app.clone().oneshot(request).await.unwrap();
        response.headers()["x-ratelimit-limit"].to_str().unwrap().to_owned()
    }

    /// Starts to follow a file with the old limits. Returns the file, the app and the task.
    fn follow(name: &str, interval: Duration) -> (PathBuf, Router, tokio::task::JoinHandle<()>) {
        let file = std::env::temp_dir().join(format!("limits-{name}-{}.toml", std::process::id()));
        std::fs::write(&file, OLD).unwrap();
        let limits = LiveLimits::new(Limits::parse(OLD).unwrap());
        let app = app(&limits);
        let task = tokio::spawn(limits.follow(file.clone(), OLD.to_owned(), interval));
        (file, app, task)
    }

    #[tokio::test]
    async fn changed_file_changes_the_limits_and_an_invalid_one_does_not() {
        let (file, app, task) = follow("changed", POLL);
        assert_eq!(limit(&app).await, "10");
        for invalid in ["api = \"20/minute\"", "api = \"20/minute\"\nlogin = \"3/mins\"", ""] {
            std::fs::write(&file, invalid).unwrap();
            sleep(10 * POLL).await;
            assert_eq!(limit(&app).await, "10", "{invalid:?}");
        }
        std::fs::remove_file(&file).unwrap();
        sleep(10 * POLL).await;
        std::fs::write(&file, NEW).unwrap();
        while limit(&app).await == "10" {
            sleep(POLL).await;
        }
        assert_eq!(limit(&app).await, "20");
        task.abort();
        std::fs::remove_file(&file).unwrap();
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn hangup_changes_the_limits_at_once() {
        // From now on, SIGHUP does not end the process.
        drop(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup()).unwrap());
        let (file, app, task) = follow("hangup", Duration::from_secs(3_600));
        std::fs::write(&file, NEW).unwrap();
        while limit(&app).await == "10" {
            let kill = format!("kill -HUP {}", std::process::id());
            assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
            sleep(POLL).await;
        }
        assert_eq!(limit(&app).await, "20");
        task.abort();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn no_limit_changes_if_one_is_invalid() {
        let limits = LiveLimits::new(Limits::parse(OLD).unwrap());
        for (invalid, error) in [
            ("api = \"20/minute\"", "missing field `login`"),
            ("api = \"20/minute\"\nlogin = \"3/mins\"", "\"mins\""),
            ("api = 'limit \"api-2\" 20/second; 40/minute'\nlogin = \"3/minute\"", "api-2"),
            ("api = \"20/minute\"\nlogin = \"3/minute\"\nlogout = \"1/minute\"", "unknown field `logout`"),
        ] {
            let message = limits.change(invalid).unwrap_err().to_string();
            assert!(message.contains(error), "{message}");
            assert_eq!(limits.api.get(), Limits::parse(OLD).unwrap().api);
        }
        limits.change(NEW).unwrap();
        assert_eq!(limits.login.get(), Limits::parse(NEW).unwrap().login);
    }
}
