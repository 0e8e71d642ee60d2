//! Medians and how far they can be trusted.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;

/// Resamples of a bootstrap.
const RESAMPLES: usize = 2_000;

/// A number and the interval that holds it with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The median, or a quotient of two.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// A quantile of unsorted values, 0 of none.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = q * sorted.len().saturating_sub(1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    match (sorted.get(low), sorted.get(high)) {
        (Some(low), Some(high)) => low + (high - low) * at.fract(),
        _ => 0.0,
    }
}

/// The median.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The median of the rounds.
pub fn estimate(rounds: &[f64]) -> Estimate {
    bootstrap(rounds.len(), |pick| median(&pick.iter().map(|&n| rounds[n]).collect::<Vec<_>>()))
}

/// One arm's median divided by another's. Rounds are drawn in pairs: what disturbed one disturbed the other.
pub fn ratio(above: &[f64], below: &[f64]) -> Estimate {
    bootstrap(above.len().min(below.len()), |pick| {
        let of = |rounds: &[f64]| median(&pick.iter().map(|&n| rounds[n]).collect::<Vec<_>>());
        of(above) / of(below)
    })
}

fn bootstrap(rounds: usize, statistic: impl Fn(&[usize]) -> f64) -> Estimate {
    let all: Vec<usize> = (0..rounds).collect();
    if rounds == 0 {
        return Estimate { value: 0.0, low: 0.0, high: 0.0 };
    }
    // Always the same: the numbers of a file can be computed again.
    let mut rng = StdRng::seed_from_u64(1);
    let mut seen = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        let pick: Vec<usize> = (0..rounds).map(|_| rng.random_range(0..rounds)).collect();
        seen.push(statistic(&pick));
    }
    Estimate { value: statistic(&all), low: quantile(&seen, 0.025), high: quantile(&seen, 0.975) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_values() {
        for (values, q, expected) in [
            (&[][..], 0.5, 0.0),
            (&[3.0][..], 0.99, 3.0),
            (&[3.0, 1.0, 2.0][..], 0.5, 2.0),
            (&[4.0, 1.0, 2.0, 3.0][..], 0.5, 2.5),
            (&[0.0, 10.0][..], 0.99, 9.9),
        ] {
            assert!((quantile(values, q) - expected).abs() < 1e-9, "{values:?} {q}");
        }
    }

    #[test]
    fn an_interval_holds_its_value_and_narrows() {
        let noisy: Vec<f64> = (0..20).map(|n| 100.0 + f64::from(n % 5)).collect();
        let twice: Vec<f64> = noisy.iter().map(|value| value * 2.0).collect();
        let found = ratio(&twice, &noisy);
        assert!((found.value - 2.0).abs() < 1e-9 && found.low <= 2.0 && found.high >= 2.0, "{found:?}");
        let wide = estimate(&noisy);
        assert!(wide.low <= wide.value && wide.value <= wide.high && wide.high - wide.low <= 4.0, "{wide:?}");
    }
}
