//! The log: text or JSON, and a filter that can be changed while the agent runs.

use anyhow::Result;
use tracing_subscriber::{EnvFilter, Registry, layer::SubscriberExt, reload, util::SubscriberInitExt};

/// Reaches the filter of the running process. Clones reach the same one.
#[derive(Clone)]
pub struct Level(reload::Handle<EnvFilter, Registry>);

/// Begins to log, as `WEIR_LOG` says.
///
/// # Errors
/// When something logs already.
pub fn start(json: bool) -> Result<Level> {
    let filter = EnvFilter::try_from_env("WEIR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let (filter, handle) = reload::Layer::new(filter);
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let registry = tracing_subscriber::registry().with(filter);
    if json {
        registry.with(layer.json()).try_init()?;
    } else {
        registry.with(layer).try_init()?;
    }
    Ok(Level(handle))
}

impl Level {
    /// The filter as it is.
    pub fn show(&self) -> String {
        self.0.with_current(ToString::to_string).unwrap_or_default()
    }

    /// Another filter: `debug`, or by module as in `info,weir_agent::reconcile=debug`.
    ///
    /// # Errors
    /// In words, when it is no filter.
    pub fn set(&self, text: &str) -> Result<(), String> {
        let filter = EnvFilter::builder().parse(text).map_err(|error| error.to_string())?;
        self.0.reload(filter).map_err(|error| error.to_string())?;
        tracing::info!(filter = text, "log filter changed");
        Ok(())
    }
}
