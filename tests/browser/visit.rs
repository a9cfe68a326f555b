//! A visit of a page: its server, a browser, and the errors of its console.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chromiumoxide::browser::{Browser, BrowserConfig};
use chromiumoxide::cdp::browser_protocol::emulation::{MediaFeature, SetDeviceMetricsOverrideParams};
use chromiumoxide::cdp::browser_protocol::log::{EventEntryAdded, LogEntryLevel};
use chromiumoxide::cdp::js_protocol::runtime::{ConsoleApiCalledType, EventConsoleApiCalled, EventExceptionThrown};
use chromiumoxide::page::{Page, ScreenshotParams};
use futures_util::StreamExt;

/// The longest time until a condition holds. It is long, because test machines can be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The height of screens that are narrower than 600 pixels.
pub(crate) const PHONE_HEIGHT: u16 = 740;

pub(crate) struct Visit {
    browser: Browser,
    page: Page,
    /// The playground, if the page is one of it.
    server: Option<Child>,
    errors: Arc<Mutex<Vec<String>>>,
}

impl Visit {
    /// Starts the playground and opens its page with this query.
    pub(crate) async fn start(query: &str) -> Self {
        let (server, address) = serve();
        Self::open(&format!("{address}/{query}"), Some(server)).await
    }

    /// Opens a page. The playground ends with the visit.
    pub(crate) async fn open(url: &str, server: Option<Child>) -> Self {
        let browser = browse().await;
        let page = browser.new_page("about:blank").await.expect("a page opens");
        let errors = Arc::new(Mutex::new(Vec::new()));
        listen(&page, &errors).await;
        let visit = Self { browser, page, server, errors };
        visit.resize(1600).await;
        visit.page.goto(url).await.expect("the page loads");
        visit
    }

    /// Loads the page again.
    pub(crate) async fn reload(&self) {
        self.page.reload().await.expect("the page loads");
    }

    /// Kills the browser.
    pub(crate) async fn kill(mut self) {
        self.browser.kill().await.expect("the browser runs").expect("it can be killed");
    }

    /// Closes the browser, and checks that its console has no error.
    pub(crate) async fn end(mut self) {
        let errors = self.errors.lock().expect("no listener panics").clone();
        assert!(errors.is_empty(), "the console has errors: {errors:#?}");
        self.browser.close().await.expect("the browser closes");
        self.browser.wait().await.expect("the browser ends");
    }

    /// Returns the value of an expression in the page.
    pub(crate) async fn value<T: serde::de::DeserializeOwned>(&self, expression: &str) -> T {
        let result = self.page.evaluate(expression).await.unwrap_or_else(|error| panic!("{expression}: {error}"));
        result.into_value().unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    /// Waits until an expression in the page is `true`.
    pub(crate) async fn until(&self, expression: &str) {
        let expression = format!("Boolean({expression})");
        let holds = async {
            while !self.value::<bool>(&expression).await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, holds).await.is_err() {
            self.screenshot("failed", 1600, false).await;
            let errors = self.errors.lock().expect("no listener panics").clone();
            panic!("not within {PATIENCE:?}: {expression}; console: {errors:#?}");
        }
    }

    pub(crate) async fn text(&self, selector: &str) -> String {
        self.value(&format!("document.querySelector({selector:?}).innerText")).await
    }

    /// Replaces the text of a field by typing.
    pub(crate) async fn fill(&self, selector: &str, text: &str) {
        self.value::<bool>(&format!("document.querySelector({selector:?}).select() ?? true")).await;
        self.element(selector).await.type_str(text).await.expect("the field accepts text");
    }

    pub(crate) async fn choose(&self, selector: &str, value: &str) {
        let code = format!(
            "(field => {{ field.value = {value:?}; return field.dispatchEvent(new Event('input', {{ bubbles: true }})) }})
             (document.querySelector({selector:?}))"
        );
        self.value::<bool>(&code).await;
    }

    pub(crate) async fn click(&self, selector: &str) {
        self.element(selector).await.click().await.unwrap_or_else(|error| panic!("{selector}: {error}"));
    }

    pub(crate) async fn focus(&self, selector: &str) {
        self.element(selector).await.focus().await.unwrap_or_else(|error| panic!("{selector}: {error}"));
    }

    pub(crate) async fn press(&self, selector: &str, key: &str) {
        self.element(selector).await.press_key(key).await.unwrap_or_else(|error| panic!("{selector} {key}: {error}"));
    }

    async fn element(&self, selector: &str) -> chromiumoxide::Element {
        self.page.find_element(selector).await.unwrap_or_else(|error| panic!("{selector}: {error}"))
    }

    /// Changes the size of the screen, and waits until the lanes are drawn for it.
    pub(crate) async fn resize(&self, width: u32) {
        let height = if width < 600 { PHONE_HEIGHT.into() } else { 1000 };
        let size = SetDeviceMetricsOverrideParams::new(i64::from(width), height, 1.0, width < 600);
        self.page.execute(size).await.expect("the size can be emulated");
        // The page draws its lanes again after its width has changed.
        tokio::time::sleep(Duration::from_millis(400)).await;
        let drawn = "document.getElementById('lanes')?.getAttribute('aria-busy') !== 'true'";
        while !self.value::<bool>(drawn).await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Writes a picture of the whole page into the folder of screenshots. Returns the width of the
    /// content.
    pub(crate) async fn screenshot(&self, name: &str, width: u32, dark: bool) -> u32 {
        let scheme = if dark { "dark" } else { "light" };
        let feature = |name: &str, value: &str| MediaFeature::new(name, value);
        let features = vec![feature("prefers-color-scheme", scheme), feature("prefers-reduced-motion", "reduce")];
        self.page.emulate_media_features(features).await.expect("the screen can be emulated");
        self.resize(width).await;
        // Taking the picture resizes the page.
        let content = self.value("document.documentElement.scrollWidth").await;
        let folder = folder();
        std::fs::create_dir_all(&folder).expect("the folder can be created");
        let params = ScreenshotParams::builder().full_page(true).build();
        self.page.save_screenshot(params, folder.join(format!("{name}.png"))).await.expect("the file can be written");
        content
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// The folder of screenshots.
fn folder() -> PathBuf {
    let default = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/playground");
    std::env::var_os("TOWER_RATELIMIT_SCREENSHOTS").map_or_else(default, PathBuf::from)
}

/// Starts the playground on a free port, and returns its address.
fn serve() -> (Child, String) {
    let program = std::env::var_os("TOWER_RATELIMIT_PLAYGROUND").expect("scripts/playground-test names the program");
    let mut server =
        Command::new(program).args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("it is piped")).read_line(&mut line).expect("it prints a line");
    let address = line.trim().strip_prefix("listening on ").expect("the line has the address").to_owned();
    (server, address)
}

async fn browse() -> Browser {
    static PROFILES: AtomicU32 = AtomicU32::new(0);
    let profile = format!("profile-{}-{}", std::process::id(), PROFILES.fetch_add(1, Ordering::Relaxed));
    let config = BrowserConfig::builder()
        .new_headless_mode()
        // Test containers cannot create the sandbox, which a trusted page does not need.
        .no_sandbox()
        .arg("disable-gpu")
        .launch_timeout(PATIENCE)
        .request_timeout(PATIENCE)
        .user_data_dir(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(profile))
        .build()
        .expect("Chromium is installed");
    let (browser, mut handler) = Browser::launch(config).await.expect("Chromium starts");
    tokio::spawn(async move { while handler.next().await.is_some() {} });
    browser
}

/// Collects errors of the console, of scripts and of the network.
async fn listen(page: &Page, errors: &Arc<Mutex<Vec<String>>>) {
    page.enable_log().await.expect("the log can be read");
    page.enable_runtime().await.expect("the console can be read");
    let mut logged = page.event_listener::<EventEntryAdded>().await.expect("the log can be read");
    let mut printed = page.event_listener::<EventConsoleApiCalled>().await.expect("the console can be read");
    let mut thrown = page.event_listener::<EventExceptionThrown>().await.expect("the console can be read");
    let errors = Arc::clone(errors);
    tokio::spawn(async move {
        loop {
            let error = tokio::select! {
                Some(event) = logged.next() => {
                    let entry = &event.entry;
                    let url = entry.url.clone().unwrap_or_default();
                    (entry.level == LogEntryLevel::Error && !is_expected(&entry.text, &url))
                        .then(|| format!("{}: {url}", entry.text))
                }
                Some(event) = printed.next() => {
                    let is_error = matches!(event.r#type, ConsoleApiCalledType::Error | ConsoleApiCalledType::Warning);
                    is_error.then(|| format!("{:?}", event.args))
                }
                Some(event) = thrown.next() => Some(format!("{:?}", event.exception_details)),
                else => break,
            };
            errors.lock().expect("no listener panics").extend(error);
        }
    });
}

/// Returns `true` for an error that the tests expect. Chromium logs each status of at least 400,
/// and the page shows refusals and invalid policies.
fn is_expected(text: &str, url: &str) -> bool {
    let path = url.splitn(4, '/').nth(3).unwrap_or_default();
    text.contains("status of 429") && (path.starts_with("try?") || path == "simulate" || path == "events")
        || text.contains("status of 422") && path == "simulate"
}
