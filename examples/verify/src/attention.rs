//! Attention cases: q, k, v and d_out in; out, lse, dq, dk and dv to compare with.
//!
//! B batch, H query heads, G key/value heads, Sq and Sk whole sequences, D head dim.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use burn_context_parallel::attention::ulysses;
use burn_context_parallel::flash::{FlashOptions, flash_attention_with_lse};
use burn_context_parallel::group::{ProcessGroup, launch};
use burn_context_parallel::sequence::{Documents, SequenceLayout};
use burn_context_parallel::vjp::pullback;
use burn_context_parallel::{Error, Result};
use burn_upipe::upipe::{Given, Schedule, upipe_cross};
use serde_json::{Map, Value};

use crate::file::{self, Reference};
use crate::report::{Measure, Trouble};
use crate::{Plan, Scheme};

/// Outputs and lse may differ by this part of their largest magnitude.
const OUTPUT: f64 = 2e-5;
/// Gradients by this, or by what rounding of the scores gives.
const GRADIENT: f64 = 5e-5;

struct Case {
    q: TensorData,
    k: TensorData,
    v: TensorData,
    d_out: TensorData,
    options: FlashOptions,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    plan: Plan,
}

/// One rank's results: out, dq, dk, dv of its tokens.
type Part = ([Tensor<4>; 4], Option<Tensor<3>>);

/// Runs the case in `path`.
pub fn run(path: &Path, plan: &Plan) -> std::result::Result<Vec<Measure>, Trouble> {
    let reference = Reference::read(path)?;
    let shape = reference.get::<4>("q")?.shape().to_vec();
    let options = options(path, shape[2])?;
    let wanted =
        [reference.get::<4>("out")?, reference.get::<4>("dq")?, reference.get::<4>("dk")?, reference.get::<4>("dv")?];
    let lse = reference.get::<3>("lse")?;
    let (q, k) = (reference.get::<4>("q")?, reference.get::<4>("k")?);
    let (v, d_out) = (reference.get::<4>("v")?, reference.get::<4>("d_out")?);
    expect_shapes(&q, &k, &v, &d_out)?;
    let layout = |data: &TensorData| {
        SequenceLayout::contiguous(data.shape()[2], plan.ranks).map_err(|error| Trouble::from_error(&error))
    };
    let gradient = GRADIENT.max(4.0 * 2f64.powi(-24) * largest_score(&q, &k, &options));
    let floors = floors(&q, &k, &v, &d_out, &options);
    let (q_layout, kv_layout) = (layout(&q)?, layout(&k)?);
    let case = Arc::new(Case { q, k, v, d_out, options, q_layout, kv_layout, plan: plan.clone() });

    let shared = case.clone();
    let parts: Vec<Part> =
        launch(plan.ranks, move |world| shared.on_rank(&world)).map_err(|error| Trouble::from_error(&error))?;

    let mut measures = Vec::new();
    let kinds = ["attention.out", "attention.gradient", "attention.gradient", "attention.gradient"];
    for (index, name) in ["out", "dq", "dk", "dv"].into_iter().enumerate() {
        let layout = if index < 2 { &case.q_layout } else { &case.kv_layout };
        let tensors: Vec<Tensor<4>> = parts.iter().map(|(tensors, _)| tensors[index].clone()).collect();
        let got = layout.assemble(&tensors, 2).into_data();
        let limit = if index == 0 { OUTPUT } else { gradient };
        measures.push(Measure::above(floors[index], kinds[index], name, &got, &wanted[index], limit));
    }
    if let (Scheme::Single, Some(got)) = (plan.scheme, &parts[0].1) {
        measures.push(Measure::new("attention.lse", "lse", &got.to_data(), &lse, OUTPUT));
    }
    Ok(measures)
}

impl Case {
    fn on_rank(&self, world: &ProcessGroup) -> Result<Part> {
        let device = self.plan.devices.of_rank(world.rank());
        let cut = |data: &TensorData, layout: &SequenceLayout| {
            layout.cut(&Tensor::<4>::from_data(data.clone(), device), 2, world.rank())
        };
        let leaf = |data: &TensorData, layout: &SequenceLayout| cut(data, layout).autodiff().require_grad();
        let q = leaf(&self.q, &self.q_layout);
        let k = leaf(&self.k, &self.kv_layout);
        let v = leaf(&self.v, &self.kv_layout);
        let d_out = cut(&self.d_out, &self.q_layout);

        let (out, lse) = self.attend(q.clone(), k.clone(), v.clone(), world)?;
        let value = out.clone().inner();
        let mut grads = pullback(out, d_out);
        let mut grad = |leaf: &Tensor<4>, name: &str| {
            leaf.grad_remove(&mut grads).ok_or_else(|| {
                Error::invalid("verify", format!("{name} has no gradient"), "report this as a bug of the scheme")
            })
        };
        let grads = [grad(&q, "q")?, grad(&k, "k")?, grad(&v, "v")?];
        let [dq, dk, dv] = grads;
        Ok(([value, dq, dk, dv], lse.map(Tensor::inner)))
    }

    /// [B, H, L, D], and what lse the scheme gives out.
    fn attend(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        world: &ProcessGroup,
    ) -> Result<(Tensor<4>, Option<Tensor<3>>)> {
        let (q_layout, kv_layout) = (&self.q_layout, &self.kv_layout);
        match self.plan.scheme {
            Scheme::Single => {
                let (out, lse) = flash_attention_with_lse(q, k, v, &self.options)?;
                Ok((out, Some(lse)))
            }
            Scheme::Ulysses => Ok((ulysses(q, k, v, &self.options, world, q_layout, kv_layout)?, None)),
            Scheme::Upipe => {
                let (heads, kv_heads) = (q.dims()[1], k.dims()[1]);
                let per_stage =
                    self.plan.heads_per_stage.unwrap_or_else(|| Schedule::default_per_stage(heads, world.size()));
                let schedule = Schedule::new(heads, kv_heads, world.size(), per_stage)?;
                let (source, inputs) = Given::new(q.swap_dims(1, 2), k.swap_dims(1, 2), v.swap_dims(1, 2));
                let out = upipe_cross(source, inputs, &schedule, &self.options, world, q_layout, kv_layout)?;
                Ok((out.swap_dims(1, 2), None))
            }
        }
    }
}

/// The options of a case with `s_q` queries; those that are not built are named.
fn options(path: &Path, s_q: usize) -> std::result::Result<FlashOptions, Trouble> {
    let metadata = file::metadata(path).map_err(Trouble::Failed)?;
    let text = metadata.get("options").map_or("", String::as_str);
    let failed = |problem: String| Trouble::Failed(format!("options {text}: {problem}: make the file again"));
    let fields: Map<String, Value> = serde_json::from_str(text).map_err(|error| failed(error.to_string()))?;
    let mut options = FlashOptions::full();
    let mut unbuilt = Vec::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let wrong = || failed(format!("{name} is {value}"));
        let size = || value.as_u64().and_then(|size| usize::try_from(size).ok()).ok_or_else(wrong);
        match name.as_str() {
            "causal" => options.causal = value.as_bool().ok_or_else(wrong)?,
            "scale" => options.scale = Some(value.as_f64().ok_or_else(wrong)?),
            "softcap" => options.softcap = Some(value.as_f64().ok_or_else(wrong)?),
            "q_offset" => options.q_offset = value.as_i64().ok_or_else(wrong)?,
            "k_offset" => options.k_offset = value.as_i64().ok_or_else(wrong)?,
            "window" => options.window = Some(size()?),
            "cu_seqlens" => {
                let boundaries: Vec<usize> = serde_json::from_value(value.clone()).map_err(|_| wrong())?;
                let documents = documents(boundaries, s_q).map_err(|error| failed(error.to_string()))?;
                options = options.with_documents(documents);
            }
            _ => unbuilt.push(format!("{name} {value}")),
        }
    }
    if !unbuilt.is_empty() {
        return Err(Trouble::Unsupported(unbuilt.join(", ")));
    }
    Ok(options)
}

/// Documents between boundaries; what comes after the last boundary is one more document, as the references have it.
fn documents(mut boundaries: Vec<usize>, len: usize) -> Result<Documents> {
    // Before anything of that size is made.
    if let Some(beyond) = boundaries.iter().find(|boundary| **boundary > len) {
        let problem = format!("cu_seqlens reach {beyond}, there are {len} queries");
        return Err(Error::invalid("verify", problem, "give the boundaries of the file's own sequence"));
    }
    match boundaries.last() {
        Some(last) if *last < len => boundaries.push(len),
        _ => {}
    }
    Documents::from_cu_seqlens(&boundaries)
}

fn expect_shapes(
    q: &TensorData,
    k: &TensorData,
    v: &TensorData,
    d_out: &TensorData,
) -> std::result::Result<(), Trouble> {
    let (qs, ks) = (q.shape(), k.shape());
    let fits = qs == d_out.shape()
        && ks == v.shape()
        && (qs[0], qs[3]) == (ks[0], ks[3])
        && ks[1] > 0
        && qs[1].is_multiple_of(ks[1]);
    if fits {
        return Ok(());
    }
    Err(Trouble::Failed(format!(
        "q {qs:?}, k {ks:?}, v {:?}, d_out {:?} do not fit: make the file again",
        v.shape(),
        d_out.shape()
    )))
}

/// The largest magnitude of a score that a query sees, in f64: what rounding errors of gradients are proportional to.
fn largest_score(q: &TensorData, k: &TensorData, options: &FlashOptions) -> f64 {
    let [batch, heads, s_q, dim] = [0, 1, 2, 3].map(|d| q.shape()[d]);
    let (kv_heads, s_k) = (k.shape()[1], k.shape()[2]);
    let (q, k): (Vec<f64>, Vec<f64>) = (q.iter::<f64>().collect(), k.iter::<f64>().collect());
    let scale = options.resolved_scale(dim);
    let mut largest = 0.0f64;
    for b in 0..batch {
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            for i in 0..s_q {
                let row = ((b * heads + h) * s_q + i) * dim;
                for j in (0..s_k).filter(|j| options.sees(b, i, *j)) {
                    let column = ((b * kv_heads + g) * s_k + j) * dim;
                    let score: f64 = q[row..row + dim].iter().zip(&k[column..column + dim]).map(|(q, k)| q * k).sum();
                    let score = (score * scale).abs();
                    largest = largest.max(options.softcap.map_or(score, |cap| cap * (score / cap).tanh()));
                }
            }
        }
    }
    largest
}

/// How small the largest magnitude of out, dq, dk and dv may be before differences are measured against the terms they are made
/// of instead: a query that sees one key has a dq of exactly 0, and references hold the rounding of two terms that cancel.
fn floors(q: &TensorData, k: &TensorData, v: &TensorData, d_out: &TensorData, options: &FlashOptions) -> [f64; 4] {
    const CANCELLED: f64 = 5e-3;
    let largest = |data: &TensorData| data.iter::<f64>().fold(0.0, |max: f64, value| max.max(value.abs()));
    let dim = q.shape()[3];
    let d_scores = largest(v) * largest(d_out) * (dim as f64).sqrt() * options.resolved_scale(dim).abs();
    [0.0, CANCELLED * d_scores * largest(k), CANCELLED * d_scores * largest(q), 0.0]
}
