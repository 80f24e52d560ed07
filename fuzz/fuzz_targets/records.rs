//! What lies inside a checkpoint: the metadata, the VRAM files' table, CRIU's images, the engines' records, a reference to
//! a store. The first byte says which.
#![no_main]

use std::collections::BTreeMap;
use std::path::Path;

use cryopod_archive::metadata::Metadata;
use cryopod_archive::store::Reference;
use cryopod_archive::vram::VramIndex;
use cryopod_archive::{container::engine, criu};
use libfuzzer_sys::fuzz_target;

const IMAGES: [&str; 6] = [
    "inventory.img",
    "pstree.img",
    "core-1.img",
    "files.img",
    "mm-1.img",
    "pagemap-1.img",
];
const RECORDS: [&str; 3] = ["config.dump", "spec.dump", "status.dump"];

fuzz_target!(|data: &[u8]| {
    let [which, rest @ ..] = data else { return };
    match which % 6 {
        0 => drop(Metadata::parse(rest, Path::new("cryopod.json"))),
        1 => drop(VramIndex::parse(rest, Path::new("vram-index.img"))),
        // The files follow each other, each with two bytes of length.
        2 => drop(criu::read(&split(rest, &IMAGES, "checkpoint/"), 1 << 20)),
        3 => drop(engine::read(&split(rest, &RECORDS, ""))),
        4 => drop(engine::read_containerd("record", rest, &Default::default())),
        _ => drop(Reference::parse(rest, Path::new("cryopod-store.json"))),
    }
});

fn split(mut data: &[u8], names: &[&str], below: &str) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for name in names {
        let [a, b, rest @ ..] = data else { break };
        let (content, rest) =
            rest.split_at(rest.len().min(usize::from(u16::from_le_bytes([*a, *b]))));
        files.insert(format!("{below}{name}"), content.to_vec());
        data = rest;
    }
    files
}
