//! OCI images.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::source::Source;
use cryopod_archive::verify::{VerifyOptions, verify};
use serde_json::{Value, json};

use crate::Count;
use crate::make::*;

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

    refused! { count:
        "no index.json" => then(&|p| fs::remove_file(p.join("index.json")).unwrap());
        "no oci-layout" => then(&|p| fs::remove_file(p.join("oci-layout")).unwrap());
        "oci-layout: version \"9\"" => then(&|p| {
            fs::write(p.join("oci-layout"), r#"{"imageLayoutVersion":"9"}"#).unwrap();
        });
        "index.json: not valid JSON" => then(&|p| fs::write(p.join("index.json"), "[").unwrap());
        "index.json: version \"1\"" => index(&|i| i["schemaVersion"] = 1.into());
        "names no image" => index(&|i| i["manifests"] = json!([]));
        "names 2 images" => index(&|i| { let one = i["manifests"][0].clone(); i["manifests"] = json!([one, one]); });
        "the image of media type \"application/vnd.docker" => index(&|i| {
            i["manifests"][0]["mediaType"] =
                "application/vnd.docker.distribution.manifest.v2+json".into();
        });
    }
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
    refused! { count:
        "is missing" => index(&|i| i["manifests"][0]["digest"] = Digest::of(b"x").to_string().into());
        "bytes, the manifest says 17" => index(&|i| i["manifests"][0]["size"] = 17.into());
        "index.json: 5242880 bytes" => then(&|p| {
            fs::File::create(p.join("index.json"))
                .unwrap()
                .set_len(5 << 20)
                .unwrap();
        });
    }

    refused! { count:
        "the manifest: version \"1\"" => manifest(&|m| m["schemaVersion"] = 1.into());
        "the manifest of media type" => manifest(&|m| m["mediaType"] = "text/html".into());
        "the config of media type \"application/vnd.docker" => manifest(&|m| {
            m["config"]["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
        });
        "no layers" => manifest(&|m| m["layers"] = json!([]));
        "129 layers, at most 128" => manifest(&|m| {
            let one = m["layers"][0].clone();
            m["layers"] = vec![one; 129].into();
        });
        "2 layers, but the config has 1 diff_ids" => manifest(&|m| {
            let one = m["layers"][0].clone();
            m["layers"] = json!([one, one]);
        });
    }
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
    refused! { count:
        "layer 0 is to be fetched from a URL" => manifest(&|m| {
            m["layers"][0]["urls"] = json!(["http://example.com/layer"]);
        });
        "zstd data cannot be decompressed" => manifest(&|m| {
            m["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+zstd".into();
        });
        "more than 600 bytes of content" => |p: &Path| {
            let layer = zstd(&Tar::good().end());
            let mut image = Layout::new(vec![layer]);
            image.media[0] += "+zstd";
            let change = |m: &mut Value| {
                m["layers"][0]["annotations"] = json!({"dev.cryopod.layer.bytes": "600"})
            };
            image.write(p, change, same, none);
        };
        "an image index for several platforms" => |p: &Path| {
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
        };
    }

    // Blobs that are not what their names say.
    refused! { count:
        "is missing" => then(&|p| fs::remove_file(first_layer(p)).unwrap());
        "bytes, the manifest says" => then(&|p| {
            let content = fs::read(first_layer(p)).unwrap();
            fs::write(first_layer(p), &content[..content.len() - 512]).unwrap();
        });
        "its content has the digest" => then(&|p| {
            let mut content = fs::read(first_layer(p)).unwrap();
            content[520] ^= 1; // inside config.dump
            fs::write(first_layer(p), content).unwrap();
        });
        "not a regular file" => then(&|p| {
            let real = p.join("real");
            fs::rename(first_layer(p), &real).unwrap();
            symlink(&real, first_layer(p)).unwrap();
        });
        "not a regular file" => then(&|p| {
            fs::remove_file(first_layer(p)).unwrap();
            nix::unistd::mkfifo(&first_layer(p), nix::sys::stat::Mode::S_IRWXU).unwrap();
        });
        "not a regular file" => then(&|p| {
            fs::remove_file(first_layer(p)).unwrap();
            fs::create_dir(first_layer(p)).unwrap();
        });
        "layer 0: its decompressed content has the digest" => |p: &Path| {
            let mut image = Layout::good();
            image.config["rootfs"]["diff_ids"] = json!([Digest::of(b"other").to_string()]);
            image.write(p, same, same, none);
        };
        "the config: not valid JSON" => |p: &Path| {
            let mut image = Layout::good();
            image.config = json!(7);
            image.write(p, same, same, none);
        };
    }
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
    assert!(count.0 >= 40 && count.1 >= 29, "{} {}", count.0, count.1);
}
