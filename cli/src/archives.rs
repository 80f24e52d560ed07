//! Verbs that read, write, convert and transfer archives, and what they share.

pub(crate) mod bundle;
pub(crate) mod confined;
mod cosign_key;
pub(crate) mod flatten;
pub(crate) mod pack;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod registry_args;
pub(crate) mod signature;
pub(crate) mod streams;
pub(crate) mod unpack;
pub(crate) mod verify;
