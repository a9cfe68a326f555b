//! The policies file, and reloading it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde::Deserialize;
use serde::de::Error as _;
use tower_ratelimit::{ConfigError, Policy};

/// The time between two checks of the file.
const INTERVAL: Duration = Duration::from_secs(1);
/// An editor may write a file in several steps. A changed file is read again after this time, and
/// is used if its content is still the same.
const SETTLE: Duration = Duration::from_millis(50);

/// The content of a policies file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Policies {
    /// The limits of every request whose client has no tier.
    #[serde(deserialize_with = "named_default")]
    pub(crate) default: Policy,
    /// Limits of single paths, in addition to the limits of every request.
    #[serde(default, deserialize_with = "named_routes")]
    pub(crate) routes: BTreeMap<String, Policy>,
    /// Limits by the value of the tier header.
    #[serde(default, deserialize_with = "named_tiers")]
    pub(crate) tiers: BTreeMap<String, Policy>,
    /// Limits with a key of their own, in addition to those of the client.
    #[serde(default)]
    pub(crate) also: Vec<Also>,
    /// The key, as in `--key`, that the keys of the client and of `also` are within.
    pub(crate) within: Option<String>,
}

/// A policy with a key of its own. A request spends from all policies or from none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Also {
    pub(crate) policy: Policy,
    /// A key as in `--key`.
    pub(crate) key: String,
}

impl Policies {
    /// Returns each policy with the place where it is set.
    pub(crate) fn all(&self) -> impl Iterator<Item = (String, &Policy)> {
        let routes = self.routes.iter().map(|(path, policy)| (format!("route {path}"), policy));
        let tiers = self.tiers.iter().map(|(tier, policy)| (format!("tier {tier}"), policy));
        let also = self.also.iter().map(|also| (format!("[[also]] with the key {:?}", also.key), &also.policy));
        [("default".to_owned(), &self.default)].into_iter().chain(routes).chain(tiers).chain(also)
    }

    /// Returns the keys of the policies that have their own.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.also.iter().map(|also| also.key.clone()).collect()
    }
}

/// Names a policy that has no name. A named policy keeps the spent units when its amount changes.
pub(crate) fn named(policy: Policy, name: &str) -> Result<Policy, ConfigError> {
    if policy.name().is_some() { Ok(policy) } else { policy.try_with_name(name) }
}

fn named_default<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Policy, D::Error> {
    named(Policy::deserialize(deserializer)?, "default").map_err(D::Error::custom)
}

fn named_routes<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Policy>, D::Error> {
    let routes = named_tiers(deserializer)?;
    match routes.keys().find(|path| !path.starts_with('/')) {
        Some(path) => Err(D::Error::custom(format!("invalid path {path:?}: write one like \"/login\""))),
        None => Ok(routes),
    }
}

fn named_tiers<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Policy>, D::Error> {
    let policies = BTreeMap::<String, Policy>::deserialize(deserializer)?;
    let name_all = policies.into_iter().map(|(name, policy)| {
        let policy = named(policy, &name).map_err(D::Error::custom)?;
        Ok((name, policy))
    });
    name_all.collect()
}

/// The current policies. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Current(Arc<RwLock<Arc<Policies>>>);

impl Current {
    pub(crate) fn new(policies: Policies) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(policies))))
    }

    /// Returns the current policies. A request calls it once, so all its limits are from the same
    /// version of the file.
    pub(crate) fn get(&self) -> Arc<Policies> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, policies: Policies) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policies);
    }
}

/// A policies file and its last content.
pub(crate) struct PoliciesFile {
    path: PathBuf,
    content: String,
    hangup: Hangup,
}

impl PoliciesFile {
    /// Opens the file and reads its policies.
    pub(crate) fn open(path: &Path) -> Result<(Self, Policies), String> {
        // From now on SIGHUP does not end the process.
        let hangup = Hangup::new();
        let content = read_now(path)?;
        let policies = parse(path, &content)?;
        Ok((Self { path: path.to_owned(), content, hangup }, policies))
    }

    /// Reloads the file at SIGHUP and whenever its content changes. `check` validates the policies.
    ///
    /// Comparing the content works with every editor, for a file that is written in place and for
    /// one that is replaced. It does not depend on the precision of time stamps.
    pub(crate) async fn follow(mut self, current: Current, check: impl Fn(&Policies) -> Result<(), String>) {
        loop {
            let content = tokio::select! {
                () = self.hangup.recv() => read(&self.path).await,
                () = tokio::time::sleep(INTERVAL) => match self.changed().await {
                    Some(content) => content,
                    None => continue,
                },
            };
            let loaded = content.and_then(|content| {
                self.content = content;
                let policies = parse(&self.path, &self.content)?;
                check(&policies).map_err(|error| format!("{}: {error}", self.path.display()))?;
                Ok(policies)
            });
            match loaded {
                Ok(policies) => {
                    current.set(policies);
                    tracing::info!(file = %self.path.display(), "policies reloaded");
                }
                Err(error) => tracing::warn!(error, "cannot reload the policies, the old ones remain in effect"),
            }
        }
    }

    /// Returns the new content if the file has changed. A file that is missing for a moment, while
    /// an editor replaces it, has not changed.
    async fn changed(&self) -> Option<Result<String, String>> {
        let first = read(&self.path).await.ok().filter(|content| *content != self.content)?;
        tokio::time::sleep(SETTLE).await;
        let second = read(&self.path).await.ok()?;
        (first == second).then_some(Ok(second))
    }
}

async fn read(path: &Path) -> Result<String, String> {
    let file = path.to_owned();
    let read = tokio::task::spawn_blocking(move || read_now(&file)).await;
    read.map_err(|error| error.to_string())?
}

fn read_now(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Parses the file. An error has the line and the column.
fn parse(path: &Path, content: &str) -> Result<Policies, String> {
    let mut policies: Policies = toml::from_str(content).map_err(|error| {
        let before = &content[..error.span().map_or(0, |span| span.start)];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        format!("{}: line {line}, column {column}: {}", path.display(), error.message())
    })?;
    for also in &mut policies.also {
        also.policy = named(also.policy.clone(), &also.key).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(policies)
}

/// The signal SIGHUP, which exists on Unix only.
#[cfg(unix)]
struct Hangup(tokio::signal::unix::Signal);

#[cfg(unix)]
impl Hangup {
    fn new() -> Self {
        use tokio::signal::unix::{SignalKind, signal};
        Self(signal(SignalKind::hangup()).expect("SIGHUP can be listened for"))
    }

    async fn recv(&mut self) {
        self.0.recv().await;
    }
}

#[cfg(not(unix))]
struct Hangup;

#[cfg(not(unix))]
impl Hangup {
    fn new() -> Self {
        Self
    }

    async fn recv(&mut self) {
        std::future::pending().await
    }
}
