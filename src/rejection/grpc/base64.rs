//! Base64 without padding, which gRPC uses for binary metadata.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes `bytes` (RFC 4648, section 4) without padding.
pub(super) fn unpadded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| usize::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        // One byte needs two characters, two need three, and three need four.
        for character in 0..=group.len() {
            text.push(ALPHABET[bits >> (18 - 6 * character) & 0x3f].into());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vectors of RFC 4648, section 10.
    #[test]
    fn vectors_of_the_rfc_are_encoded_without_padding() {
        let vectors = ["", "f", "fo", "foo", "foob", "fooba", "foobar"];
        let expected = ["", "Zg", "Zm8", "Zm9v", "Zm9vYg", "Zm9vYmE", "Zm9vYmFy"];
        assert_eq!(vectors.map(|vector| unpadded(vector.as_bytes())), expected);
        assert_eq!(unpadded(&[0xfb, 0xff, 0xfe]), "+//+");
    }
}
