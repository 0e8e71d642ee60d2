//! The stream of one watch.

use std::{io, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use futures::stream;
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    error::ApiError,
    http::Shared,
    object::{Object, Shape},
    query::{Start, WatchRequest},
    resource::Resource,
    selector::Filter,
    store::{Change, ListQuery},
};

/// How many changes go out in one piece.
const BATCH: usize = 500;

pub(super) struct Watch {
    shared: Arc<Shared>,
    resource: Resource,
    filter: Filter,
    shape: Shape,
    bookmarks: bool,
    mark_initial: bool,
    /// Objects there were when the watch began, still to send.
    initial: std::vec::IntoIter<Arc<Object>>,
    /// All up to this version has been looked at.
    seen: u64,
    written: watch::Receiver<u64>,
    cuts: watch::Receiver<u64>,
    deadline: Instant,
    every: Duration,
    next_bookmark: Instant,
    finished: bool,
}

/// Why a watch woke up.
enum Wake {
    Written,
    Bookmark,
    Deadline,
    Cut,
}

impl Watch {
    /// `cuts` is subscribed to before the request was let in: a cut since then counts.
    pub(super) fn new(
        shared: Arc<Shared>,
        resource: Resource,
        request: WatchRequest,
        shape: Shape,
        cuts: watch::Receiver<u64>,
    ) -> Result<Self, ApiError> {
        let written = shared.written.subscribe();
        let every = shared.config.bookmark_every;
        let now = Instant::now();
        let mut watch = Self {
            resource,
            filter: request.filter,
            shape,
            bookmarks: request.bookmarks,
            mark_initial: request.mark_initial,
            initial: Vec::new().into_iter(),
            seen: 0,
            written,
            cuts,
            deadline: now + request.timeout,
            every,
            next_bookmark: now + every,
            finished: false,
            shared: shared.clone(),
        };
        let store = shared.read();
        match request.start {
            Start::State(at_least) if at_least > store.version() => {
                return Err(ApiError::too_large(at_least, store.version()));
            }
            Start::State(_) => {
                let filter = &watch.filter;
                let page = store.list(&ListQuery { resource, filter, at: None, after: None, limit: 0 })?;
                watch.initial = page.objects.into_iter();
                watch.seen = page.version;
            }
            Start::After(from) => {
                watch.seen = from.unwrap_or(store.version());
                // A running stream says so too, but there a version may be compacted and yet complete.
                store.reachable(resource, watch.seen)?;
            }
        }
        Ok(watch)
    }

    pub(super) fn into_body(self) -> Body {
        Body::from_stream(stream::unfold(self, |mut watch| async {
            let piece = watch.piece().await?;
            Some((piece, watch))
        }))
    }

    /// The next piece of the stream; an error cuts the connection, none ends the watch.
    async fn piece(&mut self) -> Option<io::Result<Bytes>> {
        if self.finished {
            return None;
        }
        let mut out = Vec::new();
        if self.initial.len() > 0 {
            for object in self.initial.by_ref().take(BATCH) {
                event(&mut out, "ADDED", |out| object.write(out, self.resource, self.shape, object.version));
            }
            return Some(Ok(out.into()));
        }
        if self.mark_initial {
            self.mark_initial = false;
            self.bookmark(&mut out, true);
            return Some(Ok(out.into()));
        }
        loop {
            let changes = self.shared.read().changes(self.resource, self.seen, BATCH);
            match changes {
                Ok(changes) => {
                    for change in &changes.list {
                        self.tell(&mut out, change);
                    }
                    let behind = changes.list.len() == BATCH;
                    self.seen = changes.upto;
                    if !out.is_empty() {
                        return Some(Ok(out.into()));
                    }
                    if behind {
                        continue;
                    }
                }
                Err(gone) => {
                    self.finished = true;
                    return Some(Ok(error_event(&gone)));
                }
            }
            match self.wake().await {
                Wake::Written => {}
                Wake::Bookmark => {
                    self.next_bookmark = Instant::now() + self.every;
                    self.bookmark(&mut out, false);
                    return Some(Ok(out.into()));
                }
                Wake::Deadline => {
                    self.finished = true;
                    if !self.bookmarks {
                        return None;
                    }
                    self.bookmark(&mut out, false);
                    return Some(Ok(out.into()));
                }
                Wake::Cut => {
                    self.finished = true;
                    return Some(Err(io::Error::new(io::ErrorKind::ConnectionReset, "watches are cut")));
                }
            }
        }
    }

    async fn wake(&mut self) -> Wake {
        tokio::select! {
            // A cut comes first: what was written after it belongs to the next watch.
            biased;
            _ = self.cuts.changed() => Wake::Cut,
            _ = self.written.changed() => Wake::Written,
            () = sleep_until(self.deadline) => Wake::Deadline,
            () = sleep_until(self.next_bookmark), if self.bookmarks => Wake::Bookmark,
        }
    }

    /// A change as this watch sees it: what enters its selection is added, what leaves it deleted.
    fn tell(&self, out: &mut Vec<u8>, change: &Change) {
        let wanted = |object: &Option<Arc<Object>>| {
            object.as_ref().filter(|object| self.filter.matches(object)).cloned()
        };
        let (kind, object) = match (wanted(&change.old), wanted(&change.new)) {
            (None, Some(new)) => ("ADDED", new),
            (Some(_), Some(new)) => ("MODIFIED", new),
            // As it last was, but at the version of the change.
            (Some(old), None) => ("DELETED", old),
            (None, None) => return,
        };
        event(out, kind, |out| object.write(out, self.resource, self.shape, change.version));
    }

    fn bookmark(&self, out: &mut Vec<u8>, ends_initial: bool) {
        let (kind, version) = match self.shape {
            Shape::Metadata => ("PartialObjectMetadata", "meta.k8s.io/v1"),
            _ => (self.resource.kind(), self.resource.api_version()),
        };
        let mut object = json!({
            "kind": kind, "apiVersion": version, "metadata": { "resourceVersion": self.seen.to_string() },
        });
        if ends_initial {
            object["metadata"]["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        event(out, "BOOKMARK", |out| out.extend_from_slice(object.to_string().as_bytes()));
    }
}

fn event(out: &mut Vec<u8>, kind: &str, object: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(format!("{{\"type\":\"{kind}\",\"object\":").as_bytes());
    object(out);
    out.extend_from_slice(b"}\n");
}

/// The event that ends a watch that cannot go on.
pub(super) fn error_event(error: &ApiError) -> Bytes {
    let mut out = Vec::new();
    event(&mut out, "ERROR", |out| out.extend_from_slice(error.status().to_string().as_bytes()));
    out.into()
}
