mod client;
mod connection;
mod expiry;
mod keys;
mod meta;
mod node;
mod ring;
mod server_time;
mod storage;
#[cfg(test)]
mod tests;
mod url;

pub use self::storage::MemcachedStorage;
