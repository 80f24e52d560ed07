//! k3s and rke2: they write containerd's configuration at each start. A newer one imports files of a directory; for others a
//! template says what it has beside their own.

use std::path::Path;

use anyhow::{Context, bail};
use toml_edit::{DocumentMut, Item};

use super::WantedSetup;
use super::change::{self, Change};
use super::containerd;

const BASE: &str = "{{ template \"base\" . }}\n";
const BEGIN: &str = "\n# cryopod setup: begin\n";
const END: &str = "# cryopod setup: end\n";
pub const TEMPLATE: &str = "tmpl";

pub fn changes(wanted: &WantedSetup<'_>, directory: &Path) -> anyhow::Result<Vec<Change>> {
    let path = directory.join("config.toml");
    let at = || path.display().to_string();
    let text = change::read(wanted.host, &path)?;
    let text = text.with_context(|| format!("{}: not there yet: start the node first", at()))?;
    let main: DocumentMut = text.parse().with_context(at)?;
    if let Some(own) = containerd::drop_in(&main) {
        return containerd::drop_in_change(wanted, own, &path, &main);
    }
    if wanted.default {
        bail!("give k3s or rke2 itself `default-runtime: cryopod`, in its config.yaml");
    }
    let name = match main.get("version").and_then(Item::as_integer) {
        Some(3) => "config-v3.toml.tmpl",
        _ => "config.toml.tmpl",
    };
    let path = directory.join(name);
    let before = change::read(wanted.host, &path)?;
    let stanza = containerd::stanza(wanted, &main).with_context(|| path.display().to_string())?;
    let after = with(before.as_deref().unwrap_or(BASE), &stanza);
    Ok(Change::of(path, before, after).into_iter().collect())
}

/// A template that has a runtime of this name from somebody else stays as it is.
fn with(template: &str, stanza: &str) -> String {
    let (before, after) = match around(template) {
        Some(parts) => parts,
        None if template.contains("runtimes.cryopod") => return template.to_owned(),
        None => (template, ""),
    };
    format!("{before}{BEGIN}{}\n{END}{after}", stanza.trim())
}

/// What is before and after that which the setup added.
fn around(template: &str) -> Option<(&str, &str)> {
    let (before, rest) = template.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some((before, after))
}

pub fn without(text: &str, before: Option<&str>) -> Option<String> {
    let kept = match around(text) {
        Some((before, after)) => format!("{before}{after}"),
        None => text.to_owned(),
    };
    (before.is_some() || kept != BASE).then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template() {
        let stanza = "[plugins.x.containerd.runtimes.cryopod]\na = 1\n";
        let after = with(BASE, stanza);
        assert!(after.starts_with(BASE) && after.contains(stanza), "{after}");
        assert_eq!(with(&after, stanza), after);
        assert_eq!(without(&after, None), None);
        let edited = format!("{after}# mine\n");
        assert_eq!(without(&edited, None), Some(format!("{BASE}# mine\n")));
        let newer = with(&edited, "[plugins.x.containerd.runtimes.cryopod]\na = 2\n");
        assert_eq!(newer, edited.replace("a = 1", "a = 2"));
        let theirs = "[plugins.x.containerd.runtimes.cryopod]\n";
        assert_eq!(with(theirs, stanza), theirs);
        let mine = "{{ template \"base\" . }}\n# mine";
        assert_eq!(
            without(&with(mine, stanza), Some(mine)).as_deref(),
            Some(mine)
        );
        assert_eq!(without(mine, Some(mine)).as_deref(), Some(mine));
    }
}
