//! Describes the messages of CRIU's images: their fields, types and labels, from `schema.txt`, which
//! `tests/criu/schema.py` makes of CRIU's own definitions.

use std::collections::BTreeMap;
use std::sync::OnceLock;

/// One message a line: `NAME NUMBER:FIELD:TYPE!`, where `!` is required, `?` optional and `*` repeated.
const TEXT: &str = include_str!("schema.txt");

/// A type of message.
#[derive(Debug, PartialEq, Eq)]
pub struct MessageType {
    pub name: &'static str,
    /// In the order of their numbers.
    pub fields: Vec<Field>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Field {
    pub number: u32,
    pub name: &'static str,
    pub kind: FieldType,
    pub label: Label,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Label {
    Required,
    Optional,
    Repeated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldType {
    Bool,
    /// `uint32` and `sint32`: at most 32 bits on the wire.
    Bits32,
    /// `int32` and enums: a negative number has 64 bits on the wire.
    Signed32,
    Bits64,
    Fixed32,
    Fixed64,
    /// A C string in CRIU: it ends at the first NUL.
    Text,
    Bytes,
    Message(&'static str),
}

impl MessageType {
    /// Returns the type with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        static ALL: OnceLock<BTreeMap<&str, MessageType>> = OnceLock::new();
        ALL.get_or_init(|| {
            TEXT.lines()
                .filter_map(parse)
                .map(|t| (t.name, t))
                .collect()
        })
        .get(name)
    }

    pub fn field(&self, number: u32) -> Option<&Field> {
        let at = self.fields.binary_search_by_key(&number, |f| f.number);
        at.ok().map(|at| &self.fields[at])
    }

    pub fn field_named(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|f| f.name == name)
    }
}

fn parse(line: &'static str) -> Option<MessageType> {
    let mut words = line.split(' ');
    let name = words.next()?;
    let fields = words.map(field).collect::<Option<Vec<_>>>()?;
    Some(MessageType { name, fields })
}

fn field(word: &'static str) -> Option<Field> {
    let mut parts = word.splitn(3, ':');
    let (number, name, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let (kind, label) = kind.split_at_checked(kind.len().checked_sub(1)?)?;
    Some(Field {
        number: number.parse().ok()?,
        name,
        kind: match kind {
            "bool" => FieldType::Bool,
            "uint32" | "sint32" => FieldType::Bits32,
            "int32" | "enum" => FieldType::Signed32,
            "uint64" | "int64" | "sint64" => FieldType::Bits64,
            "fixed32" => FieldType::Fixed32,
            "fixed64" | "double" => FieldType::Fixed64,
            "string" => FieldType::Text,
            "bytes" => FieldType::Bytes,
            message => FieldType::Message(message),
        },
        label: match label {
            "!" => Label::Required,
            "?" => Label::Optional,
            "*" => Label::Repeated,
            _ => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_message_and_every_type_is_there() {
        for line in TEXT.lines() {
            let parsed = parse(line).unwrap_or_else(|| panic!("{line}"));
            let numbers: Vec<u32> = parsed.fields.iter().map(|f| f.number).collect();
            assert!(numbers.is_sorted(), "{line}");
            assert_eq!(MessageType::named(parsed.name), Some(&parsed));
            for field in &parsed.fields {
                if let FieldType::Message(of) = field.kind {
                    assert!(MessageType::named(of).is_some(), "{line}: {of}");
                }
            }
        }
    }
}
