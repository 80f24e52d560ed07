//! Reads and rewrites the standard input of `start`.
//!
//! containerd before 2.3 writes the runtime's options, an `Any`. containerd 2.3 and newer write a `BootstrapParams`
//! (`containerd.runtime.bootstrap.v1`) with the options among its extensions, and read a `BootstrapResult`
//! ([`crate::ttrpc::address::Bootstrap`]). Both messages are changed field by field, to keep the fields of newer versions.

use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::well_known_types::empty::Empty;
use containerd_shim::protos::protobuf::{Message, UnknownFields, UnknownValueRef};

use crate::options;

/// `BootstrapParams.instance_id`.
const ID: u32 = 1;
/// `BootstrapParams.namespace`.
const NAMESPACE: u32 = 2;
/// `BootstrapParams.extensions`.
const EXTENSIONS: u32 = 8;
/// `Extension.value`, an `Any`.
const VALUE: u32 = 1;

#[derive(Debug, Clone, PartialEq)]
pub enum StartRequest {
    /// containerd before 2.3: the options, empty if there are none.
    Options(Any),
    /// containerd 2.3 and newer.
    Params(UnknownFields),
}

impl StartRequest {
    /// Parses a request. Options can parse as a `BootstrapParams` too, so `id` and `namespace` must match the command
    /// line, as the stock shim requires.
    pub fn read(input: &[u8], id: &str, namespace: &str) -> Self {
        let is = |fields: &UnknownFields, number, text: &str| {
            last_bytes(fields, number).unwrap_or_default() == text.as_bytes()
        };
        match fields(input).filter(|f| is(f, ID, id) && is(f, NAMESPACE, namespace)) {
            Some(params) => Self::Params(params),
            None => Self::Options(Any::parse_from_bytes(input).unwrap_or_default()),
        }
    }

    /// Returns the runtime's options, if containerd sends any.
    pub fn options(&self) -> Option<Any> {
        match self {
            Self::Options(any) => Some(any.clone()),
            Self::Params(params) => all_bytes(params, EXTENSIONS).find_map(options_of),
        }
    }

    /// Returns the same request with other options.
    pub fn with_options(&self, options: &Any) -> Vec<u8> {
        let any = options.write_to_bytes().unwrap_or_default();
        let Self::Params(params) = self else {
            return any;
        };
        let mut extension = UnknownFields::new();
        extension.add_length_delimited(VALUE, any);
        let others = all_bytes(params, EXTENSIONS).filter(|e| options_of(e).is_none());
        let others: Vec<_> = others.map(<[u8]>::to_vec).collect();
        let mut changed = params.clone();
        changed.remove(EXTENSIONS);
        for extension in others.into_iter().chain([extension.write_to_bytes()]) {
            changed.add_length_delimited(EXTENSIONS, extension);
        }
        changed.write_to_bytes()
    }
}

/// Returns the options in an `Extension`; `None` if it holds something else.
fn options_of(extension: &[u8]) -> Option<Any> {
    let any = Any::parse_from_bytes(last_bytes(&fields(extension)?, VALUE)?).ok()?;
    options::is_options(&any).then_some(any)
}

/// Returns the fields of a message of any type; `None` if it is not a message.
pub fn fields(message: &[u8]) -> Option<UnknownFields> {
    let message = Empty::parse_from_bytes(message).ok()?;
    Some(message.special_fields.unknown_fields().clone())
}

fn all_bytes(fields: &UnknownFields, number: u32) -> impl Iterator<Item = &[u8]> {
    fields.iter().filter_map(move |(n, value)| match value {
        UnknownValueRef::LengthDelimited(bytes) if n == number => Some(bytes),
        _ => None,
    })
}

/// Returns the value of a length-delimited field that is not repeated. The last one counts.
pub fn last_bytes(fields: &UnknownFields, number: u32) -> Option<&[u8]> {
    all_bytes(fields, number).last()
}
