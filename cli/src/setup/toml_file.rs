//! Edits TOML files and keeps what else is in them.

use anyhow::Context;
use toml_edit::{Item, Table, TableLike};

/// Returns a table, and makes it if it is not there.
pub fn table<'a>(
    parent: &'a mut dyn TableLike,
    key: &str,
) -> anyhow::Result<&'a mut dyn TableLike> {
    if !parent.contains_key(key) {
        parent.insert(key, implicit());
    }
    parent
        .get_mut(key)
        .and_then(Item::as_table_like_mut)
        .with_context(|| format!("`{key}` is not a table"))
}

/// Sets a value, with the spaces and the comment of the old one.
pub fn set(table: &mut dyn TableLike, key: &str, new: toml_edit::Value) {
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            let decor = old.decor().clone();
            if old.as_str() != new.as_str() || new.as_str().is_none() {
                *old = new;
                *old.decor_mut() = decor;
            }
        }
        None => {
            table.insert(key, Item::Value(new));
        }
    }
}

/// Gives a key the value that it had, or removes it if it was not there.
pub fn put_back(table: &mut dyn TableLike, old: Option<&dyn TableLike>, key: &str) {
    match (old.and_then(|old| old.get(key)), table.get_mut(key)) {
        // In place: the key keeps its comment.
        (Some(item), Some(now)) => now.clone_from(item),
        (Some(item), None) => {
            table.insert(key, item.clone());
        }
        (None, _) => {
            table.remove(key);
        }
    }
}

/// A table that had no header of its own before has none again, if it holds only tables.
pub fn hide(table: Option<&mut Item>, old: Option<&Item>) {
    let implicit = old.is_none_or(|old| old.as_table().is_some_and(Table::is_implicit));
    match table {
        Some(Item::Table(table)) if implicit => table.set_implicit(true),
        _ => {}
    }
}

/// Makes a table that shows no header of its own if it only holds tables.
pub fn implicit() -> Item {
    let mut table = Table::new();
    table.set_implicit(true);
    Item::Table(table)
}
