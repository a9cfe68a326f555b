//! Removes the command arguments that servers quote in their errors.
//!
//! Arguments contain the keys of clients, for example IP addresses.

use redis::{ErrorKind, RedisError, make_extension_error};

/// Returns the error without the quoted arguments.
pub(super) fn without_arguments(error: RedisError) -> RedisError {
    let Some(text) = error.detail() else { return error };
    let plain = redact(text);
    match (error.kind(), error.code()) {
        _ if plain == text => error,
        (kind @ ErrorKind::Server(_), _) => (kind, "the server refused", plain).into(),
        (ErrorKind::Extension, Some(code)) => make_extension_error(code.to_owned(), Some(plain)),
        _ => error,
    }
}

/// Removes a list of arguments from the end of the text, and replaces each word that contains a
/// brace by `(a key)`. Every key of this storage contains braces.
fn redact(text: &str) -> String {
    let text = text.split_once("with args").map_or(text, |(before, _)| before.trim_end_matches([' ', ',']));
    let words = text.split(' ').map(|word| if word.contains(['{', '}']) { "(a key)" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use redis::ServerErrorKind;

    use super::*;

    #[test]
    fn quoted_arguments_are_removed() {
        for (text, plain) in [
            (
                "unknown command 'EVALSHA', with args beginning with: 'ab' '1' 'rl:{p|t:k}' ",
                "unknown command 'EVALSHA'",
            ),
            ("unknown command `EVALSHA`, with args beginning with: `ab`, `1`, `rl:{p|", "unknown command `EVALSHA`"),
            (
                "User app has no permissions to access the 'rl:{p|t:k}' key",
                "User app has no permissions to access the (a key) key",
            ),
            ("The user can't run this", "The user can't run this"),
        ] {
            assert_eq!(redact(text), plain);
            let error = without_arguments((ErrorKind::Server(ServerErrorKind::NoPerm), "", text.to_owned()).into());
            assert_eq!((error.detail(), error.code()), (Some(plain), Some("NOPERM")));
            let error = without_arguments(make_extension_error("DENIED".to_owned(), Some(text.to_owned())));
            assert_eq!((error.detail(), error.code()), (Some(plain), Some("DENIED")));
        }
    }
}
