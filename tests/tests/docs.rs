//! The documents: every page of docs/ is in the book, and every relative link leads to a file and a heading that exist.

#![allow(clippy::unwrap_used, reason = "tests report by failing")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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
