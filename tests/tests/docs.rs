//! The documents: every page of docs/ is in the book, every relative link leads to a file and a heading that exist, the
//! code names pages and the pages name annotations that exist.

#![allow(clippy::unwrap_used, reason = "tests report by failing")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The pages of docs/, and the documents beside them that link to these.
fn documents() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("docs")).unwrap();
    let mut found: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    found.retain(|path| path.extension().is_some_and(|e| e == "md"));
    let others = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "tests/README.md",
        "tests/simdriver/README.md",
    ];
    found.extend(others.map(|name| root().join(name)));
    found
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// Where a document's links and pictures lead, and the anchors of its headings.
#[derive(Default)]
struct Document {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

fn read(path: &Path) -> Document {
    parse(&fs::read_to_string(path).unwrap())
}

fn parse(text: &str) -> Document {
    let mut document = Document::default();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor(&heading.take().unwrap());
                document.anchors.insert(anchor);
            }
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            _ => {}
        }
    }
    document
}

/// As mdBook and the forges make it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// What is wrong with a link of the document at `path`.
fn broken(path: &Path, document: &Document, link: &str) -> Option<&'static str> {
    if link.contains("://") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = path.parent().unwrap().join(file);
    if !file.is_empty() {
        if !target.exists() {
            return Some("no such file");
        }
        if path.starts_with(root().join("docs")) && (file.contains('/') || target.is_dir()) {
            return Some("leads out of the book; name the file in code font");
        }
    }
    if anchor.is_empty() {
        return None;
    }
    let other = (!file.is_empty()).then(|| read(&target));
    let anchors = &other.as_ref().unwrap_or(document).anchors;
    if !anchors.contains(anchor) {
        return Some("no such heading");
    }
    None
}

#[test]
fn links_hold() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in documents() {
        let document = read(&path);
        seen += document.links.len();
        for link in &document.links {
            if let Some(why) = broken(&path, &document, link) {
                wrong.push(format!("{}: {link}: {why}", name(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(seen > 100, "{seen} links are too few to be all");
}

#[test]
fn every_page_is_in_the_book_once() {
    let docs = root().join("docs");
    let summary = docs.join("SUMMARY.md");
    let listed = read(&summary).links;
    let mut pages: Vec<String> = documents()
        .into_iter()
        .filter(|path| path.starts_with(&docs) && *path != summary)
        .map(|path| name(&path))
        .collect();
    assert_eq!(
        listed.first().map(String::as_str),
        Some("tutorial.md"),
        "a newcomer begins with the tutorial"
    );
    let mut sorted = listed.clone();
    sorted.sort();
    pages.sort();
    assert_eq!(sorted, pages, "docs/SUMMARY.md and the pages of docs/");
}

/// Files of the repository that git tracks, with their text.
fn tracked(suffixes: &[&str]) -> Vec<(String, String)> {
    let git = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(git.status.success(), "{git:?}");
    let names = String::from_utf8(git.stdout).unwrap();
    let wanted = names
        .lines()
        .filter(|name| suffixes.iter().any(|s| name.ends_with(s)));
    // A tracked file may be deleted in the working tree.
    wanted
        .filter_map(|name| Some((name.to_owned(), fs::read_to_string(root().join(name)).ok()?)))
        .collect()
}

/// The words of a text that begin with `start`, up to a character that is not a part of a name.
fn words<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(start).map(|(at, _)| {
        let rest = &text[at..];
        let end = rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || "./_-".contains(c)))
            .unwrap_or(rest.len());
        rest[..end].trim_end_matches('.')
    })
}

#[test]
fn pages_that_the_code_names_exist() {
    let sources = tracked(&[
        ".rs",
        ".sh",
        "Makefile",
        "packages/build",
        "tests/vm/run",
        "CONTRIBUTING.md",
    ]);
    let mut seen = 0;
    for (name, text) in &sources {
        // This file names pages that do not exist, on purpose.
        if name.ends_with("tests/docs.rs") {
            continue;
        }
        for page in words(text, "docs/").filter(|page| page.ends_with(".md")) {
            seen += 1;
            assert!(root().join(page).is_file(), "{name} names {page}");
        }
    }
    assert!(seen > 20, "{seen} names are too few to be all");
}

#[test]
fn annotations_of_the_documents_exist() {
    let code: String = tracked(&[".rs"])
        .into_iter()
        .filter(|(name, _)| !name.starts_with("tests/"))
        .map(|(_, text)| text)
        .collect();
    let mut seen = 0;
    for path in documents() {
        // It names annotations that are no more.
        if name(&path) == "CHANGELOG.md" {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for annotation in words(&text, "dev.cryopod.") {
            seen += 1;
            assert!(code.contains(annotation), "{}: {annotation}", name(&path));
        }
    }
    assert!(seen > 50, "{seen} names are too few to be all");
}

#[test]
fn a_broken_link_is_found() {
    let path = root().join("docs/x.md");
    let text = "# A `b` c\n[1](usage.md#archives) [2](usage.md#none) [3](none.md) [4](#a-b-c) [5](#a) [6](../README.md)\n`[7](none.md)`\n";
    let document = parse(text);
    let found: Vec<_> = document
        .links
        .iter()
        .map(|link| broken(&path, &document, link).is_some())
        .collect();
    assert_eq!(found, [false, true, true, false, true, true]);
}
