//! Tars: names, types, headers.

use crate::Count;
use crate::make::*;

#[test]
fn names_and_links_that_lead_out() {
    let mut count = Count::default();
    let file = |name: &str| write(Tar::good().file(name, b"evil").end());
    let pax = |name: &str| write(Tar::good().pax(&[("path", name)]).file("x", b"evil").end());
    let raw = |name: &[u8], kind: u8| write(Tar::good().raw(name, kind, b"", b"").end());
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
        count.refused(expect, pax(path));
        let long = Tar::good().raw(b"././@LongLink", b'L', b"", format!("{path}\0").as_bytes());
        count.refused(expect, write(long.file("x", b"evil").end()));
    }
    refused! { count:
        "control characters" => file("a\nb");
        "control characters" => file("a\u{1b}[31m");
        "not UTF-8" => raw(b"a\xffb", b'0');
        "without a name" => raw(b"", b'0');
        "bytes, at most 1024" => pax(&"a/".repeat(3000));
        "bytes, at most 255" => pax(&"a".repeat(300));
        "directories inside each other" => file(&"a/".repeat(40));
        "config.dump: appears twice" => file("config.dump");
        "appears twice" => file("./checkpoint/./inventory.img");
        "appears twice" => raw(b"config.dump", b'5');
        "lies below config.dump, which is not a directory" => file("config.dump/evil");
    }

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
        "lies below checkpoint/parent, which is not a directory",
        write(through.end()),
    );
    for target in ["/etc/passwd", "../evil", "config.dump"] {
        let hard = Tar::good().raw(b"hard", b'1', target.as_bytes(), b"");
        count.refused("hard: a hard link to", write(hard.end()));
    }
    assert!(count.0 >= 35 && count.1 == count.0, "{}", count.0);
}

#[test]
fn entries_that_no_checkpoint_has() {
    let mut count = Count::default();
    let kind = |kind: u8| write(Tar::good().raw(b"odd", kind, b"", b"").end());
    refused! { count:
        "odd: a device node" => kind(b'3');
        "odd: a device node" => kind(b'4');
        "odd: a fifo" => kind(b'6');
        "odd: a sparse file" => kind(b'S');
        "odd: a tar entry of unknown type 0x5a" => kind(b'Z');
    }
    let sparse = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.realsize", "1000000000000000"),
    ];
    count.refused(
        "a sparse file",
        write(Tar::good().pax(&sparse).file("odd", b"x").end()),
    );
    count.refused(
        "a directory or link with content",
        write(Tar::good().raw(b"odd/", b'5', b"", b"xyz").end()),
    );
    assert_eq!((count.0, count.1), (7, 7));
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
    refused! { count:
        "wrong checksum" => write(changed(&|h| h.as_old_mut().name[0] = b'X', false).end());
        "unreadable size" => write(changed(&|h| h.as_old_mut().size = *b"zzzzzzzzzzz\0", true).end());
        "unreadable mode" => write(changed(&|h| h.as_old_mut().mode = *b"zzzzzzz\0", true).end());
        "unreadable size" => write(changed(&|h| h.set_size(u64::MAX), true).end());
        "bytes too early" => write(changed(&|h| h.set_size(u64::MAX - 511), true).end());
        "bytes too early" => write(changed(&|h| h.set_size(1 << 45), true).end());
        "bytes too early" => write(changed(&|h| h.set_size(1 << 63), true).end());
    }
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
    assert_eq!((count.0, count.1), (16, 16));
}
