use super::image_files::making::{image, message};
use super::*;

/// Written by CRIU 4.1.1: a container's first process and two children with three threads each.
const PSTREE: &str = "1943565430302750 0a000000 08011000180120012801 0e000000 0802100118012001280228042805 \
    0e000000 0803100118012001280328062807";
/// Of the same checkpoint.
const STATS_DUMP: &str = "4059105506330957 29000000 0a2708e43e10a7ac26189fd30720ab840728fea101300038b5a10140004800\
    5018581860006800 7000";
/// Of the same checkpoint; without its ids, and with the plugin.
const INVENTORY: &str = "16313158 18000000 080210016210620e6372796f706f645f6e7669646961 7000";

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn core(pid: u32, comm: &str, task_state: u64) -> Vec<u8> {
    let mut task = message("task_core_entry", &[("task_state", task_state)]);
    task.set_text("comm", comm);
    let mut core = message("core_entry", &[("mtype", 1)]);
    core.push("tc", task);
    image(&format!("core-{pid}.img"), &[core])
}

fn pagemap(entries: &[(u64, Option<u64>)]) -> Vec<u8> {
    let mut messages = vec![message("pagemap_head", &[("pages_id", 1)])];
    for (pages, flags) in entries {
        let mut entry = message("pagemap_entry", &[("compat_nr_pages", *pages)]);
        flags.inspect(|flags| entry.set_number("flags", *flags));
        messages.push(entry);
    }
    image("pagemap-1.img", &messages)
}

fn sample() -> BTreeMap<String, Vec<u8>> {
    let mounts = [&[("ext_mount", 1)][..], &[]].map(|fields| message("mnt_entry", fields));
    let files = [1, 1, 16, 99].map(|kind| message("file_entry", &[("type", kind)]));
    BTreeMap::from(
        [
            ("inventory.img", hex(INVENTORY)),
            ("pstree.img", hex(PSTREE)),
            ("stats-dump", hex(STATS_DUMP)),
            ("core-1.img", core(1, "sh", 1)),
            ("core-2.img", core(2, "python3", 3)),
            ("core-3.img", core(3, "gone", 6)),
            ("pagemap-1.img", pagemap(&[(10, Some(4)), (5, Some(1))])),
            ("pagemap-2.img", pagemap(&[(7, None), (100, Some(2))])),
            ("pagemap-shmem-4.img", pagemap(&[(3, Some(4))])),
            ("mountpoints-13.img", image("mountpoints-13.img", &mounts)),
            ("files.img", image("files.img", &files)),
        ]
        .map(|(name, content)| (name.to_owned(), content)),
    )
}

#[test]
fn a_checkpoint() {
    let files = sample();
    assert!(files.keys().all(|name| is_wanted(name)));
    let facts = read(&files, 0).unwrap();
    assert_eq!(facts.image_version, 2);
    assert_eq!(facts.plugins, ["cryopod_nvidia"]);
    assert_eq!(facts.arch, Some("x86_64"));
    let seen: Vec<_> = facts
        .processes
        .iter()
        .map(|p| (p.pid, p.parent, p.comm.as_str(), p.state, p.threads))
        .collect();
    assert_eq!(
        seen,
        [
            (1, 0, "sh", "running", 1),
            (2, 1, "python3", "stopped", 3),
            (3, 1, "gone", "zombie", 3),
        ]
    );
    assert_eq!(facts.processes[0].memory_bytes, 10 * 4096);
    assert_eq!(facts.processes[1].memory_bytes, 7 * 4096);
    assert_eq!(facts.memory_bytes, 20 * 4096);
    assert_eq!(facts.parent_bytes, 5 * 4096);
    assert_eq!((facts.mounts, facts.external_mounts), (2, 1));
    let kinds: Vec<_> = facts.files.iter().map(|(k, n)| (*k, *n)).collect();
    assert_eq!(
        kinds,
        [("device of a plugin", 1), ("file", 2), ("other", 1)]
    );
    let dump = facts.dump.unwrap();
    assert_eq!((dump.freezing_us, dump.frozen_us), (8036, 628_263));
    assert_eq!((dump.pages_scanned, dump.pages_written), (20_734, 20_661));
    assert_eq!(facts.restore, None);
}

#[test]
fn larger_pages() {
    let facts = read(&sample(), 20 * 65536).unwrap();
    assert_eq!(facts.memory_bytes, 20 * 65536);
}

#[test]
fn compressed_pages() {
    let mut files = sample();
    let head = message("pagemap_head", &[("pages_id", 1)]);
    let plain = message("pagemap_entry", &[("flags", 4), ("nr_pages", 20)]);
    let mut packed = plain.clone();
    packed.push(
        "blocks",
        message("pagemap_blocks", &[("total_payload_size", 12_345)]),
    );
    let content = image("pagemap-2.img", &[head, packed, plain]);
    files.insert("pagemap-2.img".into(), content);
    // 13 pages of the sample and 20 of this one are uncompressed.
    let facts = read(&files, 33 * 16384 + 12_345).unwrap();
    assert_eq!(facts.memory_bytes, 53 * 16384);

    for (compress, want) in [
        (&[][..], false),
        (&[("compress", 0)], false),
        (&[("compress", 1)], true),
    ] {
        let content = image("inventory.img", &[message("inventory_entry", compress)]);
        assert_eq!(has_compressed_pages(&content), Ok(want));
    }
    assert_eq!(has_compressed_pages(&hex(INVENTORY)), Ok(false));
}

#[test]
fn damaged() {
    let say = |name: &str, content: &[u8]| {
        let mut files = sample();
        files.insert(name.into(), content.to_vec());
        read(&files, 0).unwrap_err().to_string()
    };
    let mut files = sample();
    files.remove("inventory.img");
    assert!(
        read(&files, 0)
            .unwrap_err()
            .to_string()
            .starts_with("inventory.img: not there")
    );
    assert!(say("inventory.img", &hex("16313158")).contains("inventory.img: holds nothing"));
    assert!(
        say("pstree.img", &hex(INVENTORY))
            .contains("starts with 0x58313116, an image of that name")
    );
    for len in 9..hex(PSTREE).len() {
        let mut cut = hex(PSTREE);
        cut.truncate(len);
        if len != 8 + 14 && len != 8 + 14 + 18 {
            assert!(
                say("pstree.img", &cut).contains("pstree.img: ends in the middle"),
                "{len}"
            );
        }
    }
    let huge = [&hex("1943565430302750"), &[0xff_u8, 0xff, 0xff, 0x7f][..]].concat();
    assert!(say("pstree.img", &huge).contains("a message of 2147483647 bytes"));
    // The error names a field of another type.
    let wrong = say("core-2.img", &hex("19435654 47380555 02000000 0a00"));
    assert!(
        wrong.contains("core-2.img: message 0") && wrong.contains("mtype"),
        "{wrong}"
    );
}

#[test]
fn any_bytes() {
    use proptest::prelude::*;
    proptest!(|(bytes in proptest::collection::vec(any::<u8>(), 0..200), which in 0..6_usize, cut in 0..8_usize)| {
        let mut files = sample();
        let name = ["inventory.img", "pstree.img", "core-1.img", "pagemap-1.img", "files.img", "stats-dump"][which];
        let content = files.get_mut(name).unwrap();
        content.truncate(cut.min(content.len()));
        content.extend(bytes);
        let _ = read(&files, 0);
    });
}
