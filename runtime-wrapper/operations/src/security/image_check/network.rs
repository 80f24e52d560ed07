//! Checks what CRIU hands to `nft`, `iptables-restore` and `ip` for a network namespace that it makes.
//!
//! A container with `CAP_NET_ADMIN` may set up its own namespace as it likes. Without it, a network device in the images
//! cannot be the container's own doing.

use std::path::Path;

use cryopod_archive::criu::message::Message;

use super::CheckedImages;
use crate::security::ceiling::CredentialsCeiling;
use crate::security::privileges::{self, PrivilegesError};

/// CRIU's numbers of network devices that every namespace has, or that its caller hands over.
const LOOPBACK: u64 = 1;
const VETH: u64 = 2;
const EXTERNAL: u64 = 4;
/// Dumps of firewalls: text that other programs execute.
const FIREWALLS: [&str; 3] = ["iptables", "ip6tables", NFTABLES];
const NFTABLES: &str = "nftables";

pub fn check(
    images: &CheckedImages,
    directory: &Path,
    ceiling: &CredentialsCeiling,
) -> Result<Vec<String>, PrivilegesError> {
    let mut told = Vec::new();
    // CRIU puts it into the text of a firewall rule.
    for inventory in images.messages("inventory.img") {
        let id = inventory.text("dump_criu_run_id").unwrap_or_default();
        if !id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
            told.push(format!("inventory.img: dump_criu_run_id is {id:?}"));
        }
    }
    let may = ceiling.has("NET_ADMIN");
    for (file, devices) in images.numbered("netdev-") {
        told.extend(
            devices
                .iter()
                .filter_map(|d| wrong(d, may))
                .map(|what| format!("{file}: {what}")),
        );
    }
    for name in &images.others {
        let Some((kind, _)) = name.rsplit_once('-') else {
            continue;
        };
        if !FIREWALLS.contains(&kind) {
            continue;
        }
        let text = privileges::open(directory, name)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        // The rules are for the container's own namespace; CRIU's lock of the checkpoint is among them. But nft's `include`
        // reads files of the host.
        if text.contains('\0') || kind == NFTABLES && includes(&text) {
            told.push(format!("{name}: includes files of the host"));
        }
    }
    Ok(told)
}

/// Returns true if nft could take a word of these rules for its `include`. What `nft list ruleset` prints has none: a
/// rule's comment is quoted, and a longer name is another word.
fn includes(rules: &str) -> bool {
    // Whether a quote in a `#` comment opens a string: nothing may hide in what only one reader takes for one.
    [true, false].into_iter().any(|comments| {
        let (mut quoted, mut comment) = (false, false);
        let mut plain = String::new();
        for c in rules.chars() {
            match c {
                '\n' => comment = false,
                '#' if !quoted => comment = comments,
                '"' if !comment => quoted = !quoted,
                _ => {}
            }
            plain.push(if quoted { '"' } else { c });
        }
        let in_name = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
        let mut words = plain.split(|c| !in_name(c));
        // nft takes the longest name, which begins with a letter.
        quoted
            || words.any(|w| {
                let name = w.starts_with(|c: char| c.is_ascii_alphabetic()) && w != "include";
                w.contains("include") && !name
            })
    })
}

fn wrong(device: &Message, may: bool) -> Option<String> {
    let name = device.text("name").unwrap_or_default();
    let plain = !name.is_empty()
        && name.len() < 16
        && !name.contains(['/', ' ', '\n'])
        && !matches!(&name[..], "." | "..");
    if !plain {
        return Some(format!("a network device {name:?}"));
    }
    match device.number("type").unwrap_or(0) {
        LOOPBACK | EXTERNAL => None,
        // The other end would be in the host's namespace.
        VETH if !device.has("peer_nsid") => {
            Some(format!("{name}: a veth device with its other end outside"))
        }
        _ if may => None,
        _ => Some(format!(
            "{name}: a network device, for which a process needs CAP_NET_ADMIN, and the spec does not give it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nft_takes_for_an_include() {
        let rules = "table inet t { # handle 1\n chain pre-include {\n";
        for harmless in [
            "ip daddr 10.0.0.1 accept comment \"include the office\"\n}}",
            "jump includes\n}}",
            "jump include_all comment \"#\"\n}}",
        ] {
            assert!(!includes(&format!("{rules}{harmless}")), "{harmless}");
        }
        for hostile in [
            "}}\ninclude \"/etc/shadow\"",
            "}}\n;include\"/etc/shadow\"",
            "}}\n\"x\"include \"/etc/shadow\"",
            "}}\n5include \"/etc/shadow\"",
            "}}\n# \"\ninclude \"/etc/shadow\"\n# \"",
            "accept comment \"# \"\n}}\ninclude \"/etc/shadow\"",
            "accept comment \"never closed include",
        ] {
            assert!(includes(&format!("{rules}{hostile}")), "{hostile}");
        }
    }
}
