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

/// What comes before changes.
enum Due {
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
        loop {
            // Looked at before each piece, lest a watch with always more to tell never end.
            match self.due() {
                Some(Due::Cut) => {
                    self.finished = true;
                    return Some(Err(io::Error::new(io::ErrorKind::ConnectionReset, "watches are cut")));
                }
                Some(Due::Deadline) => {
                    self.finished = true;
                    if !self.bookmarks || self.initial.len() > 0 {
                        return None;
                    }
                    self.bookmark(&mut out, false);
                    return Some(Ok(out.into()));
                }
                Some(Due::Bookmark) if self.initial.len() == 0 => {
                    self.next_bookmark = Instant::now() + self.every;
                    self.bookmark(&mut out, false);
                    return Some(Ok(out.into()));
                }
                Some(Due::Bookmark) | None => {}
            }
            let more = match self.gather(&mut out) {
                Ok(more) => more,
                Err(gone) => {
                    self.finished = true;
                    return Some(Ok(error_event(&gone)));
                }
            };
            if !out.is_empty() {
                return Some(Ok(out.into()));
            }
            if !more {
                self.wake().await;
            }
        }
    }

    /// Writes what there is to tell, at most a batch. Is there more?
    fn gather(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        if self.initial.len() > 0 {
            for object in self.initial.by_ref().take(BATCH) {
                event(out, "ADDED", |out| object.write(out, self.resource, self.shape, object.version));
            }
            return Ok(true);
        }
        if self.mark_initial {
            self.mark_initial = false;
            self.bookmark(out, true);
            return Ok(true);
        }
        let changes = self.shared.read().changes(self.resource, self.seen, BATCH)?;
        for change in &changes.list {
            self.tell(out, change);
        }
        self.seen = changes.upto;
        Ok(changes.list.len() == BATCH)
    }

    /// What is due whether or not there are changes.
    fn due(&self) -> Option<Due> {
        let now = Instant::now();
        // An error means that the server is gone.
        if self.cuts.has_changed().unwrap_or(true) {
            Some(Due::Cut)
        } else if now >= self.deadline {
            Some(Due::Deadline)
        } else if self.bookmarks && now >= self.next_bookmark {
            Some(Due::Bookmark)
        } else {
            None
        }
    }

    /// Waits until there may be something to tell or due.
    async fn wake(&mut self) {
        let sooner = if self.bookmarks { self.deadline.min(self.next_bookmark) } else { self.deadline };
        let mut cuts = self.cuts.clone();
        tokio::select! {
            // On a clone: `due` must still see it.
            _ = cuts.changed() => {}
            _ = self.written.changed() => {}
            () = sleep_until(sooner) => {}
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
