//! Archives from strangers: each is refused with its own error, and nothing is written anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{PODMAN_CONFIG, listing, noise};
use cryopod_archive::limits::Limits;
use cryopod_archive::oci::Digest;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};
use serde_json::{Value, json};

const INVENTORY: &[u8] = b"\x19CVT\x16\x311X\0\0\0\0";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Hostile things that were refused.
#[derive(Default)]
struct Count(usize);

impl Count {
    /// The archive that `make` puts at a path is refused by everything that reads it.
    fn refused(&mut self, expect: &str, make: impl FnOnce(&Path)) {
        self.run(expect, &Limits::default(), false, make);
    }

    /// As `refused`, for what only a verification can see.
    fn seen_by_verify(&mut self, expect: &str, make: impl FnOnce(&Path)) {
        self.run(expect, &Limits::default(), true, make);
    }

    fn run(&mut self, expect: &str, limits: &Limits, verify_only: bool, make: impl FnOnce(&Path)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in/archive");
        fs::create_dir(dir.path().join("in")).unwrap();
        make(&path);
        let before = tree(dir.path());
        let at = |name: &str| dir.path().join(name);
        let open = || Source::open_image(&path, None, limits);
        let mut errors = Vec::new();
        let options = VerifyOptions {
            threads: 2,
            limits: limits.clone(),
            ..VerifyOptions::default()
        };
        errors.push(open().and_then(|s| verify(&s, &options)).map(drop));
        if !verify_only {
            let options = UnpackOptions {
                threads: 2,
                limits: limits.clone(),
                ..UnpackOptions::default()
            };
            errors.push(
                open()
                    .and_then(|s| unpack(&s, &at("unpacked"), &options))
                    .map(drop),
            );
            let options = PackOptions {
                threads: 2,
                limits: limits.clone(),
                ..PackOptions::default()
            };
            for to in [
                Destination::Layout(at("layout")),
                Destination::parse(at("out.tar.zst").to_str().unwrap()),
            ] {
                errors.push(open().and_then(|s| pack(&s, &to, &options)).map(drop));
            }
        }
        for (n, error) in errors.into_iter().enumerate() {
            let error = error
                .expect_err(&format!("way {n} took: {expect}"))
                .to_string();
            assert!(
                error.contains(expect),
                "way {n}: {error:?} has no {expect:?}"
            );
            assert!(error.contains("in/archive"), "{error}");
            assert!(error.len() < 900 && !error.contains('\n'), "{error}");
        }
        assert_eq!(tree(dir.path()), before, "{expect}");
        self.0 += 1;
    }
}

/// Everything below a folder.
fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for name in listing(dir) {
        let path = dir.join(name);
        if path.is_dir() && !path.is_symlink() {
            all.extend(tree(&path));
        }
        all.push(path);
    }
    all
}

/// A tar, made byte by byte.
#[derive(Clone, Default)]
struct Tar(Vec<u8>);

impl Tar {
    /// The start of a good archive.
    fn good() -> Self {
        Self::default()
            .file("config.dump", PODMAN_CONFIG.as_bytes())
            .file("checkpoint/inventory.img", INVENTORY)
    }

    fn file(self, name: &str, content: &[u8]) -> Self {
        self.raw(name.as_bytes(), b'0', b"", content)
    }

    fn raw(self, name: &[u8], kind: u8, link: &[u8], content: &[u8]) -> Self {
        self.with(name, kind, link, content, |_| {})
    }

    fn with(
        mut self,
        name: &[u8],
        kind: u8,
        link: &[u8],
        content: &[u8],
        change: impl FnOnce(&mut tar::Header),
    ) -> Self {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(0o6755);
        header.set_size(content.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        change(&mut header);
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn pax(self, records: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (key, value) in records {
            let body = key.len() + value.len() + 3;
            let len = (body + 1..)
                .find(|n| n.to_string().len() + body == *n)
                .unwrap();
            text += &format!("{len} {key}={value}\n");
        }
        self.raw(b"pax", b'x', b"", text.as_bytes())
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    /// Bytes so far.
    fn len(&self) -> usize {
        self.0.len()
    }
}

fn write(bytes: Vec<u8>) -> impl FnOnce(&Path) {
    move |path| fs::write(path, bytes).unwrap()
}

fn zstd(data: &[u8]) -> Vec<u8> {
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    compressor.include_checksum(true).unwrap();
    data.chunks(1 << 20)
        .flat_map(|chunk| compressor.compress(chunk).unwrap())
        .collect()
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn names_and_links_that_lead_out() {
    let mut count = Count::default();
    let file = |name: &str| write(Tar::good().file(name, b"evil").end());
    for name in [
        "../evil",
        "a/../../evil",
        "checkpoint/../../evil",
        "checkpoint/..",
        "..",
    ] {
        count.refused("a path with `..`", file(name));
    }
    for name in ["/etc/evil", "//etc/evil", "/"] {
        count.refused("an absolute path", file(name));
    }
    for (path, expect) in [
        ("../evil", "a path with `..`"),
        ("/etc/evil", "an absolute path"),
    ] {
        count.refused(
            expect,
            write(Tar::good().pax(&[("path", path)]).file("x", b"evil").end()),
        );
        let long = Tar::good().raw(b"././@LongLink", b'L', b"", format!("{path}\0").as_bytes());
        count.refused(expect, write(long.file("x", b"evil").end()));
    }
    count.refused("control characters", file("a\nb"));
    count.refused("control characters", file("a\u{1b}[31m"));
    count.refused(
        "not UTF-8",
        write(Tar::good().raw(b"a\xffb", b'0', b"", b"").end()),
    );
    count.refused(
        "without a name",
        write(Tar::good().raw(b"", b'0', b"", b"x").end()),
    );
    let long = "a/".repeat(3000);
    count.refused(
        "bytes, at most 1024",
        write(Tar::good().pax(&[("path", &long)]).file("x", b"").end()),
    );
    let part = "a".repeat(300);
    count.refused(
        "bytes, at most 255",
        write(Tar::good().pax(&[("path", &part)]).file("x", b"").end()),
    );
    count.refused("folders inside each other", file(&"a/".repeat(40)));
    count.refused("config.dump: appears twice", file("config.dump"));
    count.refused("appears twice", file("./checkpoint/./inventory.img"));
    count.refused(
        "appears twice",
        write(Tar::good().raw(b"config.dump", b'5', b"", b"").end()),
    );
    count.refused(
        "lies below config.dump, which is not a folder",
        file("config.dump/evil"),
    );

    let link =
        |name: &str, target: &str| Tar::good().raw(name.as_bytes(), b'2', target.as_bytes(), b"");
    for (name, target) in [
        ("evil", "/etc"),
        ("checkpoint/evil", "../config.dump"),
        ("checkpoint/parent", "/etc"),
        ("checkpoint/parent", "../../etc"),
        ("checkpoint/parent", "../a/b"),
        ("checkpoint/parent", "../checkpoint"),
        ("checkpoint/parent", ".."),
        ("parent", "../x"),
        ("checkpoint/a/parent", "../x"),
    ] {
        count.refused("a symbolic link to", write(link(name, target).end()));
    }
    count.refused(
        "evil: a symbolic link to /etc",
        write(link("evil", "/etc").file("evil/passwd", b"x").end()),
    );
    let through =
        link("checkpoint/parent", "../pre-checkpoint").file("checkpoint/parent/evil", b"x");
    count.refused(
        "lies below checkpoint/parent, which is not a folder",
        write(through.end()),
    );
    for target in ["/etc/passwd", "../evil", "config.dump"] {
        let hard = Tar::good().raw(b"hard", b'1', target.as_bytes(), b"");
        count.refused("hard: a hard link to", write(hard.end()));
    }
    assert!(count.0 >= 35, "{}", count.0);
}

#[test]
fn entries_that_no_checkpoint_has() {
    let mut count = Count::default();
    let kind = |kind: u8| write(Tar::good().raw(b"odd", kind, b"", b"").end());
    count.refused("odd: a device node", kind(b'3'));
    count.refused("odd: a device node", kind(b'4'));
    count.refused("odd: a fifo", kind(b'6'));
    count.refused("odd: a sparse file", kind(b'S'));
    count.refused("odd: a tar entry of unknown type 0x5a", kind(b'Z'));
    let sparse = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.realsize", "1000000000000000"),
    ];
    count.refused(
        "a sparse file",
        write(Tar::good().pax(&sparse).file("odd", b"x").end()),
    );
    count.refused(
        "a folder or link with content",
        write(Tar::good().raw(b"odd/", b'5', b"", b"xyz").end()),
    );
    assert_eq!(count.0, 7);
}

#[test]
fn headers_that_lie() {
    let mut count = Count::default();
    let changed = |change: &dyn Fn(&mut tar::Header), sum: bool| {
        Tar::good().with(b"odd", b'0', b"", b"x", |header| {
            change(header);
            if sum {
                header.set_cksum();
            }
        })
    };
    count.refused(
        "wrong checksum",
        write(changed(&|h| h.as_old_mut().name[0] = b'X', false).end()),
    );
    count.refused(
        "unreadable size",
        write(changed(&|h| h.as_old_mut().size = *b"zzzzzzzzzzz\0", true).end()),
    );
    count.refused(
        "unreadable mode",
        write(changed(&|h| h.as_old_mut().mode = *b"zzzzzzz\0", true).end()),
    );
    count.refused(
        "unreadable size",
        write(changed(&|h| h.set_size(u64::MAX), true).end()),
    );
    count.refused(
        "bytes too early",
        write(changed(&|h| h.set_size(u64::MAX - 511), true).end()),
    );
    count.refused(
        "bytes too early",
        write(changed(&|h| h.set_size(1 << 45), true).end()),
    );
    count.refused(
        "bytes too early",
        write(changed(&|h| h.set_size(1 << 63), true).end()),
    );
    let pax = Tar::good()
        .pax(&[("size", "9999999999999")])
        .file("odd", b"x");
    count.refused("bytes too early", write(pax.end()));
    count.refused(
        "extended tar header that cannot be read",
        write(Tar::good().pax(&[("size", "-1")]).file("odd", b"").end()),
    );
    let broken = Tar::good()
        .raw(b"pax", b'x', b"", b"99 path=short\n")
        .file("odd", b"");
    count.refused(
        "extended tar header that cannot be read",
        write(broken.end()),
    );
    for kind in [b'x', b'L', b'K', b'g'] {
        let huge = Tar::good().with(b"huge", kind, b"", b"", |h| {
            h.set_size(1 << 30);
            h.set_cksum();
        });
        count.refused("extended tar header of 1073741824 bytes", write(huge.end()));
    }
    count.refused(
        "without an entry after them",
        write(Tar::good().pax(&[("path", "x")]).end()),
    );
    let global = Tar::good()
        .raw(b"g", b'g', b"", b"9 path=a\n")
        .file("odd", b"");
    count.refused(
        "extended tar header that cannot be read",
        write(global.end()),
    );
    assert_eq!(count.0, 16);
}

#[test]
fn cut_off_everywhere() {
    let mut count = Count::default();
    let cut = |tar: Tar, at: usize| write(tar.0[..at].to_vec());
    let good = Tar::good();
    let header = good.len();
    let tar = good.file("checkpoint/pages-1.img", &noise(1, 5000));
    count.refused(
        "in the middle of a tar header",
        cut(tar.clone(), header + 100),
    );
    count.refused("bytes too early", cut(tar.clone(), header + 512 + 3000));
    count.refused("bytes too early", cut(tar.clone(), tar.len() - 10));
    count.refused("no end mark", cut(tar.clone(), tar.len()));
    let pax = Tar::good().pax(&[("path", "checkpoint/x")]);
    count.refused(
        "in the middle of a tar header",
        cut(pax.clone(), pax.len() - 300),
    );
    count.refused("no end mark", write(pax.0));
    let whole = tar.end();
    let (frames, gz) = (zstd(&whole), gzip(&whole));
    for at in [frames.len() - 1, frames.len() / 2] {
        count.refused(
            "zstd data cannot be decompressed",
            write(frames[..at].to_vec()),
        );
    }
    for at in [gz.len() - 1, gz.len() / 2] {
        count.refused("gzip data cannot be decompressed", write(gz[..at].to_vec()));
    }
    let mut flipped = frames.clone();
    let last = flipped.len() - 2;
    flipped[last] ^= 1; // the checksum
    count.refused("zstd data cannot be decompressed", write(flipped));
    let mut flipped = gz.clone();
    let last = flipped.len() - 6;
    flipped[last] ^= 1; // the checksum
    count.refused("gzip data cannot be decompressed", write(flipped));
    count.refused(
        "zstd data cannot be decompressed",
        write([&frames[..], b"garbage after it"].concat()),
    );
    let skip = [&frames[..], b"\x50\x2a\x4d\x18\xff\xff\xff\xff"].concat();
    count.refused("zstd data cannot be decompressed", write(skip));
    // A frame that says 256 bytes more than it has; its size field has two bytes from 256 on.
    let mut lying = zstd(&whole);
    assert_eq!(lying[4] >> 6, 1, "the size field has two bytes");
    lying[6] = lying[6].wrapping_add(1);
    count.refused("zstd data cannot be decompressed", write(lying));
    count.refused("it is empty", write(Vec::new()));
    count.refused("neither a tar nor zstd nor gzip", write(vec![b'x'; 5000]));
    count.refused(
        "a tar without checkpoint/",
        write(Tar::default().file("etc/passwd", b"x").end()),
    );
    count.refused(
        "no config.dump",
        write(
            Tar::default()
                .file("checkpoint/inventory.img", INVENTORY)
                .end(),
        ),
    );
    count.refused(
        "config.dump: not valid JSON",
        write({
            Tar::default()
                .file("config.dump", b"{")
                .file("checkpoint/inventory.img", INVENTORY)
                .end()
        }),
    );
    assert_eq!(count.0, 20);
}

#[test]
fn bombs() {
    let mut count = Count::default();
    let limits = Limits {
        ratio_slack_bytes: 1 << 20,
        ratio: 100,
        ..Limits::default()
    };
    let bomb = Tar::good()
        .file("checkpoint/pages-1.img", &vec![0; 32 << 20])
        .end();
    for bytes in [
        zstd(&bomb),
        zstd::encode_all(&bomb[..], 1).unwrap(),
        gzip(&bomb),
    ] {
        count.run("a decompression bomb", &limits, false, write(bytes));
    }
    let limits = Limits {
        entries: 50,
        ..Limits::default()
    };
    let many = (0..100)
        .fold(Tar::good(), |tar, n| tar.file(&format!("volumes/{n}"), b""))
        .end();
    count.run("more than 50 entries", &limits, false, write(many));
    let limits = Limits {
        total_bytes: 1 << 20,
        ..Limits::default()
    };
    count.run(
        "more than 1048576 bytes of content",
        &limits,
        false,
        write(bomb),
    );
    let limits = Limits {
        small_file_bytes: 1000,
        ..Limits::default()
    };
    let large = Tar::default()
        .file("config.dump", &vec![b' '; 2000])
        .file("checkpoint/inventory.img", INVENTORY);
    count.run(
        "config.dump: 2000 bytes, at most 1000",
        &limits,
        false,
        write(large.end()),
    );
    assert_eq!(count.0, 6);
}

/// An image whose parts a test changes before it is written.
struct Layout {
    layers: Vec<Vec<u8>>,
    media: Vec<&'static str>,
    config: Value,
    manifest: Value,
    index: Value,
    layout: Value,
}

impl Layout {
    fn new(layers: Vec<Vec<u8>>) -> Self {
        let diff_ids: Vec<_> = layers.iter().map(|l| Digest::of(l).to_string()).collect();
        Self {
            media: vec![LAYER; layers.len()],
            layers,
            config: json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}),
            manifest: json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}),
            index: json!({"schemaVersion": 2}),
            layout: json!({"imageLayoutVersion": "1.0.0"}),
        }
    }

    fn good() -> Self {
        Self::new(vec![Tar::good().end()])
    }

    /// Writes it; each change is made to a document before its digest is taken.
    fn write(
        mut self,
        path: &Path,
        change: impl Fn(&mut Value),
        index: impl Fn(&mut Value),
        then: impl FnOnce(&Path),
    ) {
        let blobs = path.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let put = |bytes: &[u8], media: &str| {
            let digest = Digest::of(bytes);
            fs::write(blobs.join(digest.hex()), bytes).unwrap();
            json!({"mediaType": media, "digest": digest.to_string(), "size": bytes.len()})
        };
        let layers: Vec<_> = self
            .layers
            .iter()
            .zip(&self.media)
            .map(|(l, m)| put(l, m))
            .collect();
        self.manifest["layers"] = layers.into();
        let config = serde_json::to_vec(&self.config).unwrap();
        self.manifest["config"] = put(&config, "application/vnd.oci.image.config.v1+json");
        change(&mut self.manifest);
        let manifest = serde_json::to_vec(&self.manifest).unwrap();
        self.index["manifests"] =
            json!([put(&manifest, "application/vnd.oci.image.manifest.v1+json")]);
        index(&mut self.index);
        fs::write(
            path.join("index.json"),
            serde_json::to_vec(&self.index).unwrap(),
        )
        .unwrap();
        fs::write(
            path.join("oci-layout"),
            serde_json::to_vec(&self.layout).unwrap(),
        )
        .unwrap();
        then(path);
    }
}

/// The blob of the image's first layer.
fn first_layer(path: &Path) -> PathBuf {
    path.join("blobs/sha256")
        .join(Digest::of(&Tar::good().end()).hex())
}

#[test]
fn images_that_are_not_what_they_say() {
    let mut count = Count::default();
    fn same(_: &mut Value) {}
    fn none(_: &Path) {}
    let manifest = |change: &'static dyn Fn(&mut Value)| {
        move |p: &Path| Layout::good().write(p, change, same, none)
    };
    let index = |change: &'static dyn Fn(&mut Value)| {
        move |p: &Path| Layout::good().write(p, same, change, none)
    };
    let then =
        |then: &'static dyn Fn(&Path)| move |p: &Path| Layout::good().write(p, same, same, then);

    // A good one first: what is refused below is refused for the change.
    let dir = tempfile::tempdir().unwrap();
    Layout::good().write(dir.path(), same, same, none);
    verify(
        &Source::open(dir.path()).unwrap(),
        &VerifyOptions::default(),
    )
    .unwrap();

    count.refused(
        "no index.json",
        then(&|p| fs::remove_file(p.join("index.json")).unwrap()),
    );
    count.refused(
        "no oci-layout",
        then(&|p| fs::remove_file(p.join("oci-layout")).unwrap()),
    );
    count.refused(
        "oci-layout: version \"9\"",
        then(&|p| {
            fs::write(p.join("oci-layout"), r#"{"imageLayoutVersion":"9"}"#).unwrap();
        }),
    );
    count.refused(
        "index.json: not valid JSON",
        then(&|p| fs::write(p.join("index.json"), "[").unwrap()),
    );
    count.refused(
        "index.json: version \"1\"",
        index(&|i| i["schemaVersion"] = 1.into()),
    );
    count.refused("names no image", index(&|i| i["manifests"] = json!([])));
    count.refused(
        "names 2 images",
        index(&|i| {
            let one = i["manifests"][0].clone();
            i["manifests"] = json!([one, one]);
        }),
    );
    count.refused(
        "the image of media type \"application/vnd.docker",
        index(&|i| {
            i["manifests"][0]["mediaType"] =
                "application/vnd.docker.distribution.manifest.v2+json".into();
        }),
    );
    for digest in [
        "sha256:../../../../etc/passwd",
        "sha512:abc",
        "sha256:ABCDEF",
        "",
        "sha256:/etc/passwd",
    ] {
        count.refused("is not a sha256 digest", move |p: &Path| {
            Layout::good().write(
                p,
                same,
                |i| i["manifests"][0]["digest"] = digest.into(),
                none,
            );
        });
    }
    count.refused(
        "is missing",
        index(&|i| i["manifests"][0]["digest"] = Digest::of(b"x").to_string().into()),
    );
    count.refused(
        "bytes, the manifest says 17",
        index(&|i| i["manifests"][0]["size"] = 17.into()),
    );
    count.refused(
        "index.json: 5242880 bytes",
        then(&|p| {
            fs::File::create(p.join("index.json"))
                .unwrap()
                .set_len(5 << 20)
                .unwrap();
        }),
    );

    count.refused(
        "the manifest: version \"1\"",
        manifest(&|m| m["schemaVersion"] = 1.into()),
    );
    count.refused(
        "the manifest of media type",
        manifest(&|m| m["mediaType"] = "text/html".into()),
    );
    count.refused(
        "the config of media type \"application/vnd.docker",
        manifest(&|m| {
            m["config"]["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
        }),
    );
    count.refused("no layers", manifest(&|m| m["layers"] = json!([])));
    count.refused(
        "129 layers, at most 128",
        manifest(&|m| {
            let one = m["layers"][0].clone();
            m["layers"] = vec![one; 129].into();
        }),
    );
    count.refused(
        "2 layers, but the config has 1 diff_ids",
        manifest(&|m| {
            let one = m["layers"][0].clone();
            m["layers"] = json!([one, one]);
        }),
    );
    for media in [
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "text/plain",
        "",
    ] {
        count.refused("layer 0 of media type", move |p: &Path| {
            Layout::good().write(
                p,
                |m| m["layers"][0]["mediaType"] = media.into(),
                same,
                none,
            );
        });
    }
    count.refused(
        "layer 0 is to be fetched from a URL",
        manifest(&|m| {
            m["layers"][0]["urls"] = json!(["http://example.com/layer"]);
        }),
    );
    count.refused(
        "zstd data cannot be decompressed",
        manifest(&|m| {
            m["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+zstd".into();
        }),
    );
    count.refused("more than 600 bytes of content", |p: &Path| {
        let layer = zstd(&Tar::good().end());
        let mut image = Layout::new(vec![layer]);
        image.media = vec!["application/vnd.oci.image.layer.v1.tar+zstd"];
        let change = |m: &mut Value| {
            m["layers"][0]["annotations"] = json!({"dev.cryopod.layer.bytes": "600"})
        };
        image.write(p, change, same, none);
    });
    count.refused("an image index for several platforms", |p: &Path| {
        let list = json!({"schemaVersion": 2, "manifests": [
            {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": Digest::of(b"x").to_string(), "size": 1,
             "platform": {"os": "linux", "architecture": "amd64"}}]});
        let list = serde_json::to_vec(&list).unwrap();
        let digest = Digest::of(&list);
        let change = |i: &mut Value| {
            i["manifests"][0] = json!({"mediaType": "application/vnd.oci.image.index.v1+json",
                "digest": digest.to_string(), "size": list.len()});
        };
        let then = |p: &Path| fs::write(p.join("blobs/sha256").join(digest.hex()), &list).unwrap();
        Layout::good().write(p, same, change, then);
    });

    // Blobs that are not what their names say.
    count.refused(
        "is missing",
        then(&|p| fs::remove_file(first_layer(p)).unwrap()),
    );
    count.refused(
        "bytes, the manifest says",
        then(&|p| {
            let content = fs::read(first_layer(p)).unwrap();
            fs::write(first_layer(p), &content[..content.len() - 512]).unwrap();
        }),
    );
    count.refused(
        "its content has the digest",
        then(&|p| {
            let mut content = fs::read(first_layer(p)).unwrap();
            content[520] ^= 1; // inside config.dump
            fs::write(first_layer(p), content).unwrap();
        }),
    );
    count.refused(
        "not a regular file",
        then(&|p| {
            let real = p.join("real");
            fs::rename(first_layer(p), &real).unwrap();
            symlink(&real, first_layer(p)).unwrap();
        }),
    );
    count.refused(
        "not a regular file",
        then(&|p| {
            fs::remove_file(first_layer(p)).unwrap();
            nix::unistd::mkfifo(&first_layer(p), nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    );
    count.refused(
        "not a regular file",
        then(&|p| {
            fs::remove_file(first_layer(p)).unwrap();
            fs::create_dir(first_layer(p)).unwrap();
        }),
    );
    count.refused(
        "layer 0: its decompressed content has the digest",
        |p: &Path| {
            let mut image = Layout::good();
            image.config["rootfs"]["diff_ids"] = json!([Digest::of(b"other").to_string()]);
            image.write(p, same, same, none);
        },
    );
    count.refused("the config: not valid JSON", |p: &Path| {
        let mut image = Layout::good();
        image.config = json!(7);
        image.write(p, same, same, none);
    });
    for name in ["checkpoint/.wh.core-1.img", ".wh..wh..opq"] {
        count.refused("a whiteout", move |p: &Path| {
            Layout::new(vec![Tar::good().file(name, b"").end()]).write(p, same, same, none);
        });
    }
    count.refused("config.dump: appears twice", |p: &Path| {
        let again = Tar::default().file("config.dump", b"{}").end();
        Layout::new(vec![Tar::good().end(), again]).write(p, same, same, none);
    });
    count.refused("a symbolic link to", |p: &Path| {
        let link = Tar::good().raw(b"checkpoint/x", b'2', b"/etc", b"").end();
        Layout::new(vec![link]).write(p, same, same, none);
    });
    assert!(count.0 >= 40, "{}", count.0);
}

#[test]
fn what_only_a_verification_sees() {
    let mut count = Count::default();
    let tar = |name: &str, content: &[u8]| write(Tar::good().file(name, content).end());
    count.seen_by_verify(
        "checkpoint/inventory.img: not an image of CRIU",
        write({
            Tar::default()
                .file("config.dump", PODMAN_CONFIG.as_bytes())
                .file("checkpoint/inventory.img", b"junk")
                .end()
        }),
    );
    count.seen_by_verify("spec.dump: not valid JSON", tar("spec.dump", b"{\"a\":"));
    count.seen_by_verify(
        "checkpoint/cryopod.json",
        tar("checkpoint/cryopod.json", b"{\"schema\":\"9.0\"}"),
    );
    count.seen_by_verify(
        "checkpoint/cryopod.json",
        tar("checkpoint/cryopod.json", b"{}"),
    );
    count.seen_by_verify("the image says 5 bytes of content", |p: &Path| {
        let change = |m: &mut Value| m["annotations"] = json!({"dev.cryopod.content.bytes": "5"});
        Layout::good().write(p, change, |_| {}, |_| {});
    });
    assert_eq!(count.0, 5);
}

#[test]
fn folders_with_traps() {
    let mut count = Count::default();
    let folder = |then: &'static dyn Fn(&Path)| {
        move |p: &Path| {
            fs::create_dir_all(p.join("checkpoint")).unwrap();
            fs::write(p.join("config.dump"), PODMAN_CONFIG).unwrap();
            fs::write(p.join("checkpoint/inventory.img"), INVENTORY).unwrap();
            then(p);
        }
    };
    count.refused(
        "a symbolic link to /etc/passwd",
        folder(&|p| symlink("/etc/passwd", p.join("evil")).unwrap()),
    );
    count.refused(
        "a symbolic link to /etc",
        folder(&|p| symlink("/etc", p.join("checkpoint/parent")).unwrap()),
    );
    count.refused(
        "a fifo",
        folder(&|p| {
            nix::unistd::mkfifo(&p.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    );
    count.refused(
        "a socket",
        folder(&|p| {
            drop(std::os::unix::net::UnixListener::bind(p.join("s")).unwrap());
        }),
    );
    count.refused(
        "control characters",
        folder(&|p| fs::write(p.join("a\nb"), "").unwrap()),
    );
    assert_eq!(count.0, 5);
}

#[test]
fn an_archive_larger_than_the_disk_is_not_begun() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let change = |m: &mut Value| {
        m["annotations"] = json!({"dev.cryopod.content.bytes": (1u64 << 60).to_string()})
    };
    Layout::good().write(&path, change, |_| {}, |_| {});
    let out = dir.path().join("out");
    let error = unpack(
        &Source::open(&path).unwrap(),
        &out,
        &UnpackOptions::default(),
    )
    .unwrap_err()
    .to_string();
    assert!(
        error.contains("1152921504606846976 bytes are needed"),
        "{error}"
    );
    assert_eq!(listing(dir.path()), ["image"]);
}

#[test]
fn set_id_bits_and_owners_are_not_taken() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tar");
    fs::write(&path, Tar::good().end()).unwrap(); // all with mode 6755
    let out = dir.path().join("out");
    unpack(
        &Source::open(&path).unwrap(),
        &out,
        &UnpackOptions::default(),
    )
    .unwrap();
    let meta = fs::metadata(out.join("config.dump")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o755);
}
