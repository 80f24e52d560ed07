use super::*;
use crate::request::argv::decode;
use crate::request::lowlevel::RuntimeKind;
use cryopod_test_files::TestFiles;

#[test]
fn the_command_line_names_the_overlay() {
    let line = |kind, text: &str| {
        let args: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        let inv = decode(kind, &args).unwrap();
        with_image_path(&args, &inv, Path::new("/o"), Path::new("/i"))
            .iter()
            .map(|a| a.to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
            .join(" ")
    };
    for (text, want) in [
        (
            "--root /r restore --image-path /i --work-path /w c1",
            "--root /r restore --image-path /o --work-path /w c1",
        ),
        (
            "restore --image-path=/i c1",
            "restore --work-path /i --image-path=/o c1",
        ),
        (
            "restore --image-path /x --image-path /i --work-path /w c1",
            "restore --image-path /x --image-path /o --work-path /w c1",
        ),
        ("restore c1", "restore --image-path /o --work-path /i c1"),
    ] {
        assert_eq!(line(RuntimeKind::Crun, text), want);
        assert_eq!(line(RuntimeKind::Runc, text), want);
    }
}

#[test]
fn links_are_relative_and_go_over_no_other_link() {
    let way = |a: &str, b: &str| relative(Path::new(a), Path::new(b));
    assert_eq!(
        way("/run/c/1/images", "/var/x/pages.img"),
        Path::new("../../../../var/x/pages.img")
    );
    assert_eq!(way("/a/b", "/a/c/d"), Path::new("../c/d"));
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    for d in ["images", "earlier", "op/images"] {
        dir.dir(d);
    }
    dir.put("images/pages-1.img", "pages");
    dir.put("images/tmpfs-dev-1.tar.gz.img", "old");
    dir.put("earlier/pages-1.img", "earlier");
    dir.link("images/parent", "../earlier");
    dir.link("images/dangling", "nowhere");
    let overlay = dir.join("op/images");
    overlay.put("tmpfs-dev-1.tar.gz.img", "new");
    link_rest(&dir.join("images"), &overlay, &|_| true).unwrap();
    let text = |name: &str| fs::read_to_string(overlay.join(name)).unwrap();
    assert_eq!(text("pages-1.img"), "pages");
    assert_eq!(text("tmpfs-dev-1.tar.gz.img"), "new");
    assert_eq!(text("parent/pages-1.img"), "earlier");
    assert_eq!(
        fs::read_link(overlay.join("parent")).unwrap(),
        Path::new("../../earlier")
    );
    assert!(!overlay.join("dangling").exists());
}

/// A stranger's link in place of an image: CRIU would read that file into the container's memory.
#[test]
fn links_of_an_archive_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let (images, overlay) = (dir.path().join("images"), dir.path().join("overlay"));
    fs::create_dir(&images).unwrap();
    fs::create_dir(&overlay).unwrap();
    dir.dir("earlier");
    dir.put("secret", "");
    images.put("inventory.img", "");
    images.link("parent", "../earlier");
    no_links(&images).unwrap();
    images.link("pages-1.img", dir.path().join("secret"));
    let error = no_links(&images).unwrap_err().to_string();
    assert!(error.contains("pages-1.img"), "{error}");
    link_rest(&images, &overlay, &|_| true).unwrap();
    assert!(overlay.join("parent").is_symlink());
    assert!(overlay.join("inventory.img").is_symlink());
    assert!(overlay.join("pages-1.img").symlink_metadata().is_err());
    // A parent that is a file is no checkpoint either.
    fs::remove_file(images.join("pages-1.img")).unwrap();
    fs::remove_file(images.join("parent")).unwrap();
    images.link("parent", "../secret");
    assert!(no_links(&images).is_err());
}
