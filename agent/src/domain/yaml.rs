//! YAML in, one-line errors out.

use serde::de::DeserializeOwned;

/// Text that is not YAML, or not of the form expected: what and where, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct YamlError(String);

impl From<&serde_saphyr::Error> for YamlError {
    /// The reader would show the place in the text as well, on lines of its own.
    fn from(error: &serde_saphyr::Error) -> Self {
        let text = error.without_snippet().to_string();
        Self(text.trim_start_matches("error: ").to_owned())
    }
}

/// Reads one document.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    serde_saphyr::from_str(text).map_err(|error| YamlError::from(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_that_names_place_and_cause() {
        let error = read::<Vec<u32>>("- 1\n- x\n").unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains("line 2"), "{error}");
    }
}
