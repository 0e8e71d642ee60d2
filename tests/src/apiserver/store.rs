//! The state: objects, the version counter and a bounded history. No I/O, no clock.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    iter,
    ops::Bound,
    sync::Arc,
};

use serde_json::Value;

use super::{
    error::ApiError,
    object::{Key, Object},
    resource::{Resource, TABLES},
    selector::Filter,
};

/// A write: what was there before, and after.
#[derive(Debug)]
pub(super) struct Change {
    pub version: u64,
    pub old: Option<Arc<Object>>,
    pub new: Option<Arc<Object>>,
}

impl Change {
    fn key(&self) -> &Key {
        let object = self.new.as_ref().or(self.old.as_ref());
        &object.expect("a change has an object before or after").key
    }
}

/// What changed since some version.
#[derive(Debug)]
pub(super) struct Changes {
    pub list: Vec<Arc<Change>>,
    /// Every change up to here is in the list.
    pub upto: u64,
}

/// A list to be made.
pub(super) struct ListQuery<'a> {
    pub resource: Resource,
    pub filter: &'a Filter,
    /// State as of this version; the newest if absent.
    pub at: Option<u64>,
    /// Only what comes after this key.
    pub after: Option<Key>,
    /// How many objects at most, 0 for all.
    pub limit: usize,
}

/// A list, or a page of it.
#[derive(Debug)]
pub(super) struct Page {
    pub objects: Vec<Arc<Object>>,
    /// The version the list shows.
    pub version: u64,
    /// Last key of this page, if there are more objects.
    pub next: Option<Key>,
    /// How many more; unknown when a selector was used, as in a real server.
    pub remaining: Option<usize>,
}

#[derive(Default)]
struct Table {
    objects: BTreeMap<Key, Arc<Object>>,
    /// Pods by node: the one list that must not walk all of them.
    by_node: BTreeMap<Box<str>, BTreeSet<Key>>,
    history: VecDeque<Arc<Change>>,
    /// No list or watch may start before this version.
    compacted: u64,
    /// Version of the newest change no longer in `history`. A running watch that has not seen it has
    /// lost something; one that merely stands at a compacted version has not.
    forgotten: u64,
}

impl Table {
    fn record(&mut self, change: Change, window: usize) {
        self.history.push_back(Arc::new(change));
        while self.history.len() > window {
            let forgotten = self.history.pop_front().expect("it is longer than the window").version;
            self.forgotten = forgotten;
            self.compacted = self.compacted.max(forgotten);
        }
    }

    fn index(&mut self, old: Option<&Object>, new: Option<&Object>) {
        if let Some(old) = old
            && let Some(keys) = self.by_node.get_mut(&old.node)
        {
            keys.remove(&old.key);
            if keys.is_empty() {
                self.by_node.remove(&old.node);
            }
        }
        if let Some(new) = new {
            self.by_node.entry(new.node.clone()).or_default().insert(new.key.clone());
        }
    }

    fn since(&self, version: u64) -> impl Iterator<Item = &Arc<Change>> {
        self.history.range(self.history.partition_point(|change| change.version <= version)..)
    }
}

/// All objects, and what happened to them lately.
pub(super) struct Store {
    version: u64,
    window: usize,
    tables: [Table; TABLES],
}

impl Store {
    /// An empty store that remembers the last `window` changes of each kind.
    pub(super) fn new(window: usize) -> Self {
        // Version 0 means "any" to clients, so the first one is 1.
        Self { version: 1, window, tables: Default::default() }
    }

    /// Version of the newest change.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, resource: Resource, key: &Key) -> Option<&Arc<Object>> {
        self.tables[resource.table()].objects.get(key)
    }

    /// Current objects of a namespace, or of all.
    pub(super) fn objects(
        &self,
        resource: Resource,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = &Arc<Object>> {
        let objects = &self.tables[resource.table()].objects;
        let first = namespace.map(|namespace| Key::new(namespace, ""));
        let from = first.as_ref().map_or(Bound::Unbounded, Bound::Included);
        let namespace: Option<Box<str>> = namespace.map(Into::into);
        objects
            .range::<Key, _>((from, Bound::Unbounded))
            .map(|(_, object)| object)
            .take_while(move |object| namespace.as_deref().is_none_or(|one| one == &*object.key.namespace))
    }

    /// Writes an object, whatever was there, at a new version.
    pub(super) fn put(&mut self, resource: Resource, key: Key, value: Value) -> Arc<Object> {
        self.version += 1;
        let new = Arc::new(Object::new(key.clone(), self.version, value));
        let table = &mut self.tables[resource.table()];
        let old = table.objects.insert(key, new.clone());
        if resource == Resource::Pods {
            table.index(old.as_deref(), Some(&new));
        }
        table.record(Change { version: self.version, old, new: Some(new.clone()) }, self.window);
        new
    }

    /// Removes an object: what it was, and the version of its removal.
    pub(super) fn remove(&mut self, resource: Resource, key: &Key) -> Option<(Arc<Object>, u64)> {
        let table = &mut self.tables[resource.table()];
        let old = table.objects.remove(key)?;
        self.version += 1;
        if resource == Resource::Pods {
            table.index(Some(&old), None);
        }
        table.record(Change { version: self.version, old: Some(old.clone()), new: None }, self.window);
        Some((old, self.version))
    }

    /// Forgets all history.
    pub(super) fn compact(&mut self) {
        for table in &mut self.tables {
            table.compacted = self.version;
            if let Some(last) = table.history.back() {
                table.forgotten = last.version;
            }
            table.history.clear();
        }
    }

    /// Can a list show, or a watch start from, this version?
    pub(super) fn reachable(&self, resource: Resource, version: u64) -> Result<(), ApiError> {
        let oldest = self.tables[resource.table()].compacted;
        if version < oldest { Err(ApiError::expired(version, oldest)) } else { Ok(()) }
    }

    /// What changed after a version, `max` changes at most.
    pub(super) fn changes(&self, resource: Resource, after: u64, max: usize) -> Result<Changes, ApiError> {
        let table = &self.tables[resource.table()];
        if after < table.forgotten {
            return Err(ApiError::expired(after, table.forgotten));
        }
        let list: Vec<_> = table.since(after).take(max).cloned().collect();
        let upto =
            if list.len() == max { list.last().map_or(after, |last| last.version) } else { self.version };
        Ok(Changes { list, upto: upto.max(after) })
    }

    /// Objects that match, as of now or of a version still remembered.
    pub(super) fn list(&self, query: &ListQuery<'_>) -> Result<Page, ApiError> {
        let table = &self.tables[query.resource.table()];
        let version = query.at.unwrap_or(self.version);
        if version > self.version {
            return Err(ApiError::too_large(version, self.version));
        }
        self.reachable(query.resource, version)?;
        // What has been written since: each object's first change tells what it was.
        let mut past: BTreeMap<&Key, Option<&Arc<Object>>> = BTreeMap::new();
        for change in table.since(version) {
            past.entry(change.key()).or_insert(change.old.as_ref());
        }
        let after = query.after.as_ref();
        let wanted = |object: &&Arc<Object>| {
            after.is_none_or(|after| object.key > *after) && query.filter.matches(object)
        };
        let node = query.filter.node().filter(|_| query.resource == Resource::Pods);
        let current: Box<dyn Iterator<Item = &Arc<Object>>> = if let Some(node) = node {
            Box::new(table.by_node.get(node).into_iter().flatten().map(|key| &table.objects[key]))
        } else if let Some(after) = after {
            let range = (Bound::Excluded(after), Bound::Unbounded);
            Box::new(table.objects.range::<Key, _>(range).map(|(_, object)| object))
        } else {
            Box::new(self.objects(query.resource, query.filter.namespace.as_deref()))
        };
        let mut current = current.filter(|object| !past.contains_key(&object.key)).filter(wanted).peekable();
        let mut before = past.values().flatten().copied().filter(wanted).peekable();
        let mut merged = iter::from_fn(|| match (current.peek(), before.peek()) {
            (Some(one), Some(other)) if one.key > other.key => before.next(),
            (Some(_), _) => current.next(),
            (None, _) => before.next(),
        });
        let objects: Vec<_> = if query.limit == 0 {
            merged.by_ref().cloned().collect()
        } else {
            merged.by_ref().take(query.limit).cloned().collect()
        };
        let left = if query.limit == 0 || objects.len() < query.limit {
            0
        } else if query.filter.is_empty() {
            merged.count()
        } else {
            usize::from(merged.next().is_some())
        };
        let next = if left > 0 { objects.last().map(|object| object.key.clone()) } else { None };
        let remaining = Some(left).filter(|left| *left > 0 && query.filter.is_empty());
        Ok(Page { objects, version, next, remaining })
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
