//! Tests the image parser with an encoder that knows protobuf and the published field numbers, and nothing of the
//! parser.

use super::super::image::{Images, KfdImage, RenderImage, is_image};
use super::*;

const NAME: &str = "amdgpu-kfd-7.img";

fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// The numbers of a node in the order of their fields, by name.
fn device_values(n: &Node) -> Vec<(&'static str, u64)> {
    let mut values = vec![
        ("node_id", n.id.into()),
        ("gpu_id", n.gpu_id.into()),
        ("cpu_cores_count", n.cpu_cores_count.into()),
    ];
    values.extend(n.properties.numbers());
    values.insert(9, ("gds_size_in_kb", 0));
    // The numbers of criu-amdgpu.proto.
    assert_eq!((values[10].0, values[30].0), ("num_gws", "vram_size"));
    values
}

fn device(n: &Node, without: u64, links: &[(u64, u64)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, (_, value)) in device_values(n).into_iter().enumerate() {
        if i as u64 + 1 != without {
            number(&mut out, i as u64 + 1, value);
        }
    }
    for (kind, to) in links {
        let mut link = Vec::new();
        number(&mut link, 1, *kind);
        number(&mut link, 2, *to);
        bytes(&mut out, 32, &link);
    }
    out
}

fn buffer(size: u64, flags: u64, gpu_id: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, value) in [0x7f00_0000_0000, size, 0x1000, flags, gpu_id.into()]
        .into_iter()
        .enumerate()
    {
        number(&mut out, i as u64 + 1, value);
    }
    out
}

/// `criu_kfd` without one of its fields, and one device without one of its own.
pub(super) fn kfd(t: &Topology, without: u64, without_device: (usize, u64)) -> Vec<u8> {
    let gpus = t.gpus().count() as u64;
    let mut out = Vec::new();
    let field = |out: &mut Vec<u8>, n: u64, value: u64| {
        if n != without {
            number(out, n, value);
        }
    };
    field(&mut out, 1, 42);
    field(&mut out, 2, gpus);
    field(&mut out, 3, t.nodes.len() as u64 - gpus);
    for (i, n) in t.nodes.iter().enumerate() {
        let without = if i == without_device.0 {
            without_device.1
        } else {
            0
        };
        bytes(&mut out, 4, &device(n, without, &[(2, 0), (11, 1)]));
    }
    field(&mut out, 5, 3);
    let id = t.gpus().next().unwrap().gpu_id;
    for (size, flags) in [(1 << 20, 1), (4096, 2), (1 << 21, 1 | 1 << 31)] {
        bytes(&mut out, 6, &buffer(size, flags, id));
    }
    for (n, value) in [(7, 9), (8, 4096), (9, 0)] {
        field(&mut out, n, value);
    }
    if without != 10 {
        bytes(&mut out, 10, &[0xaa; 300]);
    }
    out
}

pub(super) fn framed(contents: &[u8]) -> Vec<u8> {
    let mut out = (contents.len() as u64).to_ne_bytes().to_vec();
    out.extend_from_slice(contents);
    out
}

pub(super) fn sample() -> Topology {
    machine(2, 3, 0xa000)
}

fn error(contents: &[u8]) -> String {
    KfdImage::parse(NAME, &framed(contents))
        .unwrap_err()
        .to_string()
}

#[test]
fn what_the_plugin_writes_is_read() {
    let t = sample();
    let image = KfdImage::parse(NAME, &framed(&kfd(&t, 0, (0, 0)))).unwrap();
    assert_eq!(image.topology, t);
    assert_eq!((image.pid, image.buffers), (42, 3));
    assert_eq!(
        image.vram.into_iter().collect::<Vec<_>>(),
        [(0xa000, 3 << 20)]
    );
    assert_eq!(
        image.contents.into_iter().collect::<Vec<_>>(),
        [(0xa000, (3 << 20) + 4096)]
    );
    let mut render = Vec::new();
    number(&mut render, 1, 0xa001);
    assert_eq!(
        RenderImage::parse("amdgpu-renderD-9.img", &framed(&render))
            .unwrap()
            .gpu_id,
        0xa001
    );
}

#[test]
fn every_field_that_is_missing_is_named() {
    const OUTER: [&str; 10] = [
        "pid",
        "num_of_gpus",
        "num_of_cpus",
        "",
        "num_of_bos",
        "",
        "num_of_objects",
        "shared_mem_size",
        "shared_mem_magic",
        "priv_data",
    ];
    let t = sample();
    for (i, field) in OUTER.iter().enumerate().filter(|(_, f)| !f.is_empty()) {
        let e = error(&kfd(&t, i as u64 + 1, (0, 0)));
        assert!(e.starts_with(&format!("{NAME}: {field}: missing;")), "{e}");
    }
    for (i, (field, _)) in device_values(&t.nodes[3]).iter().enumerate() {
        let e = error(&kfd(&t, 0, (3, i as u64 + 1)));
        assert!(
            e.starts_with(&format!("{NAME}: device_entries[3].{field}: missing;")),
            "{e}"
        );
    }
    let e = RenderImage::parse("amdgpu-renderD-1.img", &framed(&[]))
        .unwrap_err()
        .to_string();
    assert!(
        e.starts_with("amdgpu-renderD-1.img: gpu_id: missing;"),
        "{e}"
    );
}

#[test]
fn cut_off_anywhere_it_is_refused() {
    let contents = kfd(&sample(), 0, (0, 0));
    let whole = framed(&contents);
    for n in 0..whole.len() {
        let e = KfdImage::parse(NAME, &whole[..n]).unwrap_err().to_string();
        assert!(e.starts_with(&format!("{NAME}: length: ")), "{n}: {e}");
    }
    // With a length that fits what is left.
    for n in 0..contents.len() {
        let e = error(&contents[..n]);
        let field = e
            .strip_prefix(&format!("{NAME}: "))
            .and_then(|e| e.split(": ").next())
            .unwrap();
        assert!(!field.is_empty() && !e.contains("length: "), "{n}: {e}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert!(
        KfdImage::parse(NAME, &longer)
            .unwrap_err()
            .to_string()
            .contains("bytes of contents announced")
    );
}

#[test]
fn foreign_and_inconsistent_files_are_refused() {
    let t = sample();
    let good = framed(&kfd(&t, 0, (0, 0)));
    let mut swapped = good.clone();
    swapped[..8].reverse();
    let e = KfdImage::parse(NAME, &swapped).unwrap_err().to_string();
    assert!(e.contains("other byte order"), "{e}");
    assert!(error(b"\x7fELF\x02\x01\x01").starts_with(NAME));
    assert!(error(b"{\"schema\": 1}").starts_with(NAME));
    let change = |what: &dyn Fn(&mut Topology)| {
        let mut t = t.clone();
        what(&mut t);
        error(&kfd(&t, 0, (0, 0)))
    };
    for (e, want) in [
        (
            change(&|t| t.nodes[3].gpu_id = 0xa000),
            "device_entries[3].gpu_id: 40960 a second time",
        ),
        (
            change(&|t| t.nodes[3].id = 0),
            "device_entries[3].node_id: 0 a second time",
        ),
        (
            change(&|t| t.nodes[3].properties.drm_render_minor = 128),
            "device_entries[3].drm_render_minor: 128 a second time",
        ),
        (
            change(&|t| t.nodes[3].properties.drm_render_minor = 12),
            "device_entries[3].drm_render_minor: 12 is none of",
        ),
        (
            change(&|t| t.nodes[3].cpu_cores_count = 3),
            "device_entries[3].cpu_cores_count: 3 for a GPU",
        ),
        (
            change(&|t| t.nodes[1].id = 5),
            "iolinks: a link to node 1, which is not there",
        ),
    ] {
        assert!(e.starts_with(&format!("{NAME}: {want}")), "{e}");
    }
    let mut more = kfd(&t, 0, (0, 0));
    bytes(&mut more, 6, &buffer(1, 1, 0xa000));
    assert!(
        error(&more).contains("num_of_bos: says 3, and the image has 4"),
        "{}",
        error(&more)
    );
    number(&mut more, 5, 4);
    assert!(KfdImage::parse(NAME, &framed(&more)).is_ok());
    bytes(&mut more, 6, &buffer(1, 1, 0xdead));
    number(&mut more, 5, 5);
    assert!(
        error(&more).contains("bo_entries: a buffer on GPU 0xdead"),
        "{}",
        error(&more)
    );
    let mut wrong_type = Vec::new();
    bytes(&mut wrong_type, 1, b"x");
    assert!(
        error(&wrong_type).contains("pid: wire type"),
        "{}",
        error(&wrong_type)
    );
    let mut far = Vec::new();
    varint(&mut far, 10 << 3 | 2);
    varint(&mut far, u64::MAX);
    assert!(
        error(&far).contains("priv_data: 18446744073709551615 bytes announced"),
        "{}",
        error(&far)
    );
}

#[test]
fn counts_and_sizes_are_bounded() {
    let mut many = Vec::new();
    for _ in 0..300 {
        bytes(&mut many, 4, &device(&gpu(1, 2, 3), 0, &[]));
    }
    assert!(error(&many).contains("device_entries: more than 256"));
    for (links, want) in [
        (vec![(2, 0); 2000], "iolinks: more than 1024"),
        (vec![(2, 0); 20_000], "length: larger than"),
        (vec![(2, 0), (7, 0)], "iolinks[1].type: 7 is neither"),
    ] {
        let mut out = Vec::new();
        bytes(&mut out, 4, &device(&gpu(1, 2, 3), 0, &links));
        let e = error(&out);
        assert!(e.contains(&format!("device_entries[0].{want}")), "{e}");
    }
}

#[test]
fn a_directory_is_searched() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let image = framed(&kfd(&sample(), 0, (0, 0)));
    let mut render = Vec::new();
    number(&mut render, 1, 0xa001);
    write("amdgpu-kfd-2.img", &image);
    write("amdgpu-kfd-1.img", &image);
    write("amdgpu-renderD-3.img", &framed(&render));
    write("amdgpu-pages-1-a000.img", b"raw");
    write("core-1.img", b"other");
    let images = Images::collect(dir.path()).unwrap();
    let names: Vec<&str> = images.kfd.iter().map(|k| k.file.as_str()).collect();
    assert_eq!(names, ["amdgpu-kfd-1.img", "amdgpu-kfd-2.img"]);
    assert_eq!(images.render[0].gpu_id, 0xa001);
    write("amdgpu-kfd-5.img", b"short");
    assert!(
        Images::collect(dir.path())
            .unwrap_err()
            .to_string()
            .starts_with("amdgpu-kfd-5.img: length:")
    );
    assert!(Images::collect(&dir.path().join("absent")).is_err());
    for (name, is) in [
        ("amdgpu-kfd-.img", false),
        ("amdgpu-kfd-x.img", false),
        ("amdgpu-renderD-10.img", true),
        ("amdgpu-kfd-1.img.tmp", false),
    ] {
        assert_eq!(is_image(name), is, "{name}");
    }
}
