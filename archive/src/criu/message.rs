//! Decodes any message of CRIU's images and encodes it again, so that CRIU reads exactly what was checked.
//!
//! Two parsers may read the same bytes differently: a field that comes twice, a number with more bits than its type, a
//! text with a NUL, a field that only one of them knows. Such a message is an error here. What is left has one meaning and
//! one encoding: fields in the order of their numbers, each number in its shortest form.

use super::schema::{Field, FieldType, Label, MessageType};

/// CRIU's deepest messages have a handful of levels; directories of cgroups nest.
const MAX_DEPTH: usize = 64;

#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    of: &'static MessageType,
    /// In the order of the fields' numbers.
    fields: Vec<(u32, Value)>,
}

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Message(Message),
}

impl Message {
    /// Decodes `bytes`. A text is returned for bytes that have more or less than one meaning.
    pub fn decode(of: &'static MessageType, bytes: &[u8]) -> Result<Self, String> {
        decode(of, bytes, DecodeMode::Strict, 0)
    }

    /// Decodes `bytes` for a report. Skips what newer versions have added; any field may be missing.
    pub fn read(of: &'static MessageType, bytes: &[u8]) -> Result<Self, String> {
        decode(of, bytes, DecodeMode::Report, 0)
    }

    /// Returns the message in protobuf's encoding, its fields in the order of their numbers.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode_to(&mut out);
        out
    }

    fn encode_to(&self, out: &mut Vec<u8>) {
        for (number, value) in &self.fields {
            let Some(field) = self.of.field(*number) else {
                continue;
            };
            match value {
                Value::Number(n) => {
                    let wire = wire_type(field.kind);
                    put_varint(out, u64::from(*number) << 3 | wire);
                    match wire {
                        1 => out.extend(n.to_le_bytes()),
                        5 => out.extend(n.to_le_bytes().into_iter().take(4)),
                        _ => put_varint(out, *n),
                    }
                }
                Value::Bytes(bytes) => {
                    put_varint(out, u64::from(*number) << 3 | 2);
                    put_varint(out, bytes.len() as u64);
                    out.extend(bytes);
                }
                Value::Message(message) => {
                    let inner = message.encode();
                    put_varint(out, u64::from(*number) << 3 | 2);
                    put_varint(out, inner.len() as u64);
                    out.extend(inner);
                }
            }
        }
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &Value> {
        let number = self.of.field_named(name).map(|f| f.number);
        let mine = self.fields.iter().filter(move |(n, _)| Some(*n) == number);
        mine.map(|(_, value)| value)
    }

    /// Returns the number in this field. Signed numbers are as on the wire.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.numbers(name).next()
    }

    /// Returns the low half of a number: all of a `uint32`.
    #[allow(clippy::cast_possible_truncation)]
    pub fn u32(&self, name: &str) -> Option<u32> {
        self.number(name).map(|n| n as u32)
    }

    /// Returns all numbers of a repeated field.
    pub fn numbers(&self, name: &str) -> impl Iterator<Item = u64> {
        self.values(name).filter_map(|v| match v {
            Value::Number(n) => Some(*n),
            _ => None,
        })
    }

    /// The low halves of all numbers of a repeated field.
    #[allow(clippy::cast_possible_truncation)]
    pub fn u32s(&self, name: &str) -> impl Iterator<Item = u32> {
        self.numbers(name).map(|n| n as u32)
    }

    /// Returns the first value of a field of bytes.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.values(name).find_map(|v| match v {
            Value::Bytes(bytes) => Some(&bytes[..]),
            _ => None,
        })
    }

    /// Returns a text; bytes that are no UTF-8 are replaced.
    pub fn text(&self, name: &str) -> Option<String> {
        self.bytes(name)
            .map(|b| String::from_utf8_lossy(b).into_owned())
    }

    /// Returns all texts of a repeated field; bytes that are no UTF-8 are replaced.
    pub fn texts(&self, name: &str) -> impl Iterator<Item = String> {
        self.values(name).filter_map(|v| match v {
            Value::Bytes(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        })
    }

    /// Returns the first message of a field.
    pub fn message(&self, name: &str) -> Option<&Self> {
        self.messages(name).next()
    }

    /// Returns all messages of a repeated field.
    pub fn messages(&self, name: &str) -> impl Iterator<Item = &Self> {
        self.values(name).filter_map(|v| match v {
            Value::Message(message) => Some(message),
            _ => None,
        })
    }

    /// Returns all messages of a repeated field, to be changed.
    pub fn messages_mut(&mut self, name: &str) -> impl Iterator<Item = &mut Self> {
        let number = self.of.field_named(name).map(|f| f.number);
        let mine = self.fields.iter_mut();
        mine.filter_map(move |(n, value)| match value {
            Value::Message(message) if Some(*n) == number => Some(message),
            _ => None,
        })
    }

    /// Returns the first message of a field, to be changed.
    pub fn message_mut(&mut self, name: &str) -> Option<&mut Self> {
        self.messages_mut(name).next()
    }

    /// Returns the messages of all fields.
    pub fn all_messages(&self) -> impl Iterator<Item = &Self> {
        self.fields.iter().filter_map(|(_, value)| match value {
            Value::Message(message) => Some(message),
            _ => None,
        })
    }

    /// Returns true if the field has a value.
    pub fn has(&self, name: &str) -> bool {
        self.values(name).next().is_some()
    }

    /// Sets a field, of a repeated one the first value. A name that the schema does not have changes nothing.
    pub fn set_number(&mut self, name: &str, number: u64) {
        self.set(name, Value::Number(number));
    }

    /// Sets all numbers of a repeated field.
    pub fn set_numbers(&mut self, name: &str, numbers: &[u64]) {
        self.remove(name);
        if let Some(field) = self.of.field_named(name) {
            let at = self.fields.partition_point(|(n, _)| *n < field.number);
            let values = numbers.iter().map(|n| (field.number, Value::Number(*n)));
            self.fields.splice(at..at, values);
        }
    }

    /// Sets a field, of a repeated one the first value. A name that the schema does not have changes nothing.
    pub fn set_bytes(&mut self, name: &str, bytes: &[u8]) {
        self.set(name, Value::Bytes(bytes.to_owned()));
    }

    /// Adds a message to a repeated field.
    pub fn push(&mut self, name: &str, message: Self) {
        if let Some(field) = self.of.field_named(name) {
            let at = self.fields.partition_point(|(n, _)| *n <= field.number);
            self.fields
                .insert(at, (field.number, Value::Message(message)));
        }
    }

    /// Sets a field, of a repeated one the first value. A name that the schema does not have changes nothing.
    pub fn set_text(&mut self, name: &str, text: &str) {
        self.set(name, Value::Bytes(text.as_bytes().to_owned()));
    }

    fn set(&mut self, name: &str, value: Value) {
        let Some(field) = self.of.field_named(name) else {
            return;
        };
        let at = self.fields.partition_point(|(n, _)| *n < field.number);
        match self.fields.get_mut(at).filter(|f| f.0 == field.number) {
            Some(there) => there.1 = value,
            None => self.fields.insert(at, (field.number, value)),
        }
    }

    /// Removes all values of a field.
    pub fn remove(&mut self, name: &str) {
        if let Some(field) = self.of.field_named(name) {
            self.fields.retain(|(n, _)| *n != field.number);
        }
    }

    /// Keeps only the messages of this field for which `keep` is true.
    pub fn retain(&mut self, name: &str, mut keep: impl FnMut(&Self) -> bool) {
        if let Some(field) = self.of.field_named(name) {
            self.fields.retain(|(n, value)| match value {
                Value::Message(message) if *n == field.number => keep(message),
                _ => true,
            });
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DecodeMode {
    Strict,
    Report,
}

fn decode(
    of: &'static MessageType,
    mut rest: &[u8],
    mode: DecodeMode,
    depth: usize,
) -> Result<Message, String> {
    let damaged = || format!("{}: ends in the middle of a field", of.name);
    if depth > MAX_DEPTH {
        return Err(format!("{}: more than {MAX_DEPTH} levels deep", of.name));
    }
    let mut fields: Vec<(u32, Value)> = Vec::with_capacity(of.fields.len().min(rest.len() / 2));
    let mut sorted = true;
    while !rest.is_empty() {
        let key = take_varint(&mut rest).ok_or_else(damaged)?;
        let number = u32::try_from(key >> 3).unwrap_or(u32::MAX);
        let Some(field) = of.field(number) else {
            if mode == DecodeMode::Report {
                skip(key & 7, &mut rest).ok_or_else(damaged)?;
                continue;
            }
            return Err(format!(
                "{}: has a field {number} that is not known; a newer CRIU?",
                of.name
            ));
        };
        let at = |what: &str| format!("{}.{}: {what}", of.name, field.name);
        let wire = key & 7;
        let packed = wire == 2 && field.label == Label::Repeated && wire_type(field.kind) == 0;
        if wire != wire_type(field.kind) && !packed {
            return Err(at("has another type than in CRIU's images"));
        }
        let ordered = fields.last().is_none_or(|(n, _)| *n <= number);
        sorted &= ordered;
        if field.label != Label::Repeated && fields.iter().any(|(n, _)| *n == number) {
            return Err(at("comes twice"));
        }
        match wire {
            0 => {
                let value = take_varint(&mut rest).ok_or_else(damaged)?;
                fields.push((
                    number,
                    Value::Number(
                        number_of(field, value).ok_or_else(|| at("is no number of its type"))?,
                    ),
                ));
            }
            1 => {
                let (bytes, after) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
                rest = after;
                fields.push((number, Value::Number(u64::from_le_bytes(*bytes))));
            }
            5 => {
                let (bytes, after) = rest.split_first_chunk::<4>().ok_or_else(damaged)?;
                rest = after;
                fields.push((number, Value::Number(u64::from(u32::from_le_bytes(*bytes)))));
            }
            _ => {
                let len = take_varint(&mut rest).ok_or_else(damaged)?;
                let len = usize::try_from(len).map_err(|_| damaged())?;
                let (mut bytes, after) = rest.split_at_checked(len).ok_or_else(damaged)?;
                rest = after;
                if packed {
                    while !bytes.is_empty() {
                        let value = take_varint(&mut bytes).ok_or_else(damaged)?;
                        let value = number_of(field, value);
                        let value = value.ok_or_else(|| at("is no number of its type"))?;
                        fields.push((number, Value::Number(value)));
                    }
                    continue;
                }
                let value = match field.kind {
                    FieldType::Message(name) => {
                        let inner = MessageType::named(name).ok_or_else(|| at("has no type"))?;
                        Value::Message(decode(inner, bytes, mode, depth + 1)?)
                    }
                    FieldType::Text if bytes.contains(&0) => return Err(at("has a NUL")),
                    _ => Value::Bytes(bytes.to_owned()),
                };
                fields.push((number, value));
            }
        }
    }
    if !sorted {
        fields.sort_by_key(|(n, _)| *n);
    }
    let message = Message { of, fields };
    let required = of.fields.iter().filter(|f| f.label == Label::Required);
    match required.into_iter().find(|f| !message.has(f.name)) {
        Some(missing) if mode == DecodeMode::Strict => {
            Err(format!("{}.{}: is missing", of.name, missing.name))
        }
        _ => Ok(message),
    }
}

fn skip(wire: u64, rest: &mut &[u8]) -> Option<()> {
    let bytes = match wire {
        0 => return take_varint(rest).map(drop),
        1 => 8,
        2 => usize::try_from(take_varint(rest)?).ok()?,
        5 => 4,
        _ => return None,
    };
    *rest = rest.get(bytes..)?;
    Some(())
}

/// Returns the value if it is one of the field's type; `None` if a parser could cut it.
fn number_of(field: &Field, value: u64) -> Option<u64> {
    let fits = match field.kind {
        FieldType::Bool => value <= 1,
        FieldType::Bits32 => u32::try_from(value).is_ok(),
        FieldType::Signed32 => i32::try_from(value.cast_signed()).is_ok(),
        _ => true,
    };
    fits.then_some(value)
}

fn wire_type(kind: FieldType) -> u64 {
    match kind {
        FieldType::Bool | FieldType::Bits32 | FieldType::Signed32 | FieldType::Bits64 => 0,
        FieldType::Fixed64 => 1,
        FieldType::Fixed32 => 5,
        FieldType::Text | FieldType::Bytes | FieldType::Message(_) => 2,
    }
}

/// Takes a varint of at most 64 bits.
fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        let bits = u64::from(byte & 127);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 128 == 0 {
            return Some(value);
        }
    }
    None
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 127 {
        out.push(u8::try_from(value & 127).unwrap_or(0) | 128);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap_or(0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(name: &str) -> &'static MessageType {
        MessageType::named(name).unwrap()
    }

    fn why(name: &str, bytes: &[u8]) -> String {
        Message::decode(of(name), bytes).unwrap_err()
    }

    #[test]
    fn bytes_with_two_meanings() {
        // utsns_entry: nodename "a", domainname "b"
        let good = b"\x0a\x01a\x12\x01b";
        let message = Message::decode(of("utsns_entry"), good).unwrap();
        assert_eq!(message.text("nodename").as_deref(), Some("a"));
        assert_eq!(message.encode(), good);
        let other_order = Message::decode(of("utsns_entry"), b"\x12\x01b\x0a\x01a").unwrap();
        assert_eq!(other_order.encode(), good);
        assert!(
            why("utsns_entry", b"\x0a\x01a\x12\x01b\x0a\x01c").contains("nodename: comes twice")
        );
        assert!(why("utsns_entry", b"\x0a\x01a").contains("domainname: is missing"));
        assert!(why("utsns_entry", b"\x0a\x02a\0\x12\x01b").contains("NUL"));
        assert!(
            why("utsns_entry", b"\x0a\x01a\x12\x01b\x18\x01").contains("field 3 that is not known")
        );
        assert!(why("utsns_entry", b"\x0a\x01a\x12\x05b").contains("ends in the middle"));
        let newer = b"\x0a\x01a\x18\x01\x21\0\0\0\0\0\0\0\0\x2a\x01x\x35\0\0\0\0";
        let report = Message::read(of("utsns_entry"), newer).unwrap();
        assert_eq!(report.encode(), b"\x0a\x01a");
        assert!(Message::read(of("utsns_entry"), &newer[..newer.len() - 1]).is_err());
        assert!(why("utsns_entry", b"\x08\x01\x12\x01b").contains("another type"));
        // pidfd_entry.id with 33 bits
        assert!(why("pidfd_entry", b"\x08\x80\x80\x80\x80\x10").contains("no number"));
        // creds.groups, packed as a newer writer might
        let mut creds = Vec::new();
        for number in (1..=8).chain([13]) {
            creds.extend([number << 3, 0]);
        }
        creds.extend(b"\x72\x02\x05\x06");
        let creds = Message::decode(of("creds_entry"), &creds).unwrap();
        assert_eq!(creds.numbers("groups").collect::<Vec<_>>(), [5, 6]);
        assert!(creds.encode().ends_with(b"\x70\x05\x70\x06"));
    }

    #[test]
    fn what_is_set_is_encoded() {
        let mut message = Message::decode(of("utsns_entry"), b"\x0a\x01a\x12\x01b").unwrap();
        message.set_text("nodename", "long");
        message.remove("domainname");
        assert_eq!(message.encode(), b"\x0a\x04long");
        message.set_text("domainname", "d");
        assert_eq!(message.encode(), b"\x0a\x04long\x12\x01d");
    }

    proptest! {
        #[test]
        fn decoding_ends_and_what_is_decoded_is_stable(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            name in prop_oneof![Just("cgroup_entry"), Just("core_entry"), Just("file_entry"), Just("seccomp_entry")],
        ) {
            if let Ok(message) = Message::decode(of(name), &bytes) {
                let again = Message::decode(of(name), &message.encode()).unwrap();
                prop_assert_eq!(again, message);
            }
        }
    }
}
