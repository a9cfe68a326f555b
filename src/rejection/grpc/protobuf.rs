//! Encodes protobuf messages. There are only three kinds of fields, so no crate is needed.

/// The bytes of a message. Fields are written in the order of the calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Message(Vec<u8>);

// The two wire types of protobuf that are used here.
const VARINT: u64 = 0;
const LENGTH_DELIMITED: u64 = 2;

impl Message {
    /// Writes an integer. Omits zero, which is the default in proto3.
    pub(super) fn int(&mut self, field: u64, value: u64) -> &mut Self {
        if value != 0 {
            self.varint(field << 3 | VARINT);
            self.varint(value);
        }
        self
    }

    pub(super) fn text(&mut self, field: u64, text: &str) -> &mut Self {
        self.delimited(field, text.as_bytes())
    }

    pub(super) fn message(&mut self, field: u64, message: &Self) -> &mut Self {
        self.delimited(field, &message.0)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn delimited(&mut self, field: u64, bytes: &[u8]) -> &mut Self {
        self.varint(field << 3 | LENGTH_DELIMITED);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Writes seven bits per byte, lowest first. The highest bit of a byte marks that more follow.
    fn varint(&mut self, mut value: u64) {
        while let Some(rest @ 1..) = value.checked_shr(7) {
            self.0.push(low_bits(value) | 0x80);
            value = rest;
        }
        self.0.push(low_bits(value));
    }
}

fn low_bits(value: u64) -> u8 {
    (value & 0x7f).to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the protobuf encoding guide.
    #[test]
    fn fields_are_encoded_as_in_the_specification() {
        let (mut number, mut text, mut nested) = (Message::default(), Message::default(), Message::default());
        assert_eq!(number.int(1, 150).bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(text.text(2, "testing").bytes(), b"\x12\x07testing");
        assert_eq!(nested.int(2, 0).message(3, &number).bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
    }

    #[test]
    fn largest_integer_takes_ten_bytes() {
        let mut message = Message::default();
        let expected = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(message.int(1, u64::MAX).bytes(), expected);
    }
}
