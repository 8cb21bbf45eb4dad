//! Flash attention for Burn's CPU backend. Plain loops for now.

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::backend::TensorMetadata;
use burn::tensor::{TensorData, DType};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{FlashOps, FlashOptions, check::FlashShape};
use crate::OrRaise;

fn load(t: FlexTensor) -> (Vec<f64>, Vec<usize>, DType) {
    let dtype = t.dtype();
    let data = t.into_data();
    let shape: Vec<usize> = data.shape().to_vec();
    (data.convert::<f64>().try_into_vec::<f64>().expect("converted to f64"), shape, dtype)
}
fn four(s: &[usize]) -> [usize; 4] {
    s.try_into().expect("four dimensions")
}
fn store(v: Vec<f64>, shape: &[usize], dtype: DType) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(v, shape.to_vec()).convert_dtype(dtype))
}
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl FlashOps for Flex {
    fn flash_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let _ = q.shape();
        let ((q, qs, dtype), (k, ks, _), (v, vs, _)) = (load(q), load(k), load(v));
        let s = FlashShape::of("flash_forward", four(&qs), four(&ks), four(&vs)).or_raise();
        let row = super::check::row_dtype("flash_forward", dtype).or_raise();
        let (d, scale) = (s.head_dim, options.resolved_scale(s.head_dim));
        let rows = s.batch * s.q_heads * s.q_len;
        let mut out = vec![0.0; rows * d];
        let lse: Vec<f64> = (0..rows).into_par_iter().zip(out.par_chunks_mut(d.max(1))).map(|(r, out)| {
            let (bh, i) = (r / s.q_len, r % s.q_len);
            let kv = ((bh / s.q_heads) * s.kv_heads + (bh % s.q_heads) / s.group()) * s.k_len * d;
            let n = options.visible(i, s.k_len);
            let p: Vec<f64> = (0..n).map(|j| scale * dot(&q[r * d..(r + 1) * d], &k[kv + j * d..kv + (j + 1) * d])).collect();
            let m = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if n == 0 { return f64::NEG_INFINITY; }
            let l: f64 = p.iter().map(|x| (x - m).exp()).sum();
            for (j, x) in p.iter().enumerate() {
                let w = (x - m).exp() / l;
                for (o, v) in out.iter_mut().zip(&v[kv + j * d..kv + (j + 1) * d]) { *o += w * v; }
            }
            m + l.ln()
        }).collect();
        (store(out, &qs, dtype), store(lse, &s.rows(), row))
    }

    fn flash_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        options: FlashOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let ((q, qs, dtype), (k, ks, _), (v, vs, _)) = (load(q), load(k), load(v));
        let ((go, ..), (lse, ..), (delta, ..)) = (load(d_out), load(lse), load(delta));
        let s = FlashShape::of("flash_backward", four(&qs), four(&ks), four(&vs)).or_raise();
        let (d, scale) = (s.head_dim, options.resolved_scale(s.head_dim));
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        for bh in 0..s.batch * s.q_heads {
            let kv = ((bh / s.q_heads) * s.kv_heads + (bh % s.q_heads) / s.group()) * s.k_len * d;
            for i in 0..s.q_len {
                let r = bh * s.q_len + i;
                let (qi, gi) = (&q[r * d..(r + 1) * d], &go[r * d..(r + 1) * d]);
                for j in 0..options.visible(i, s.k_len) {
                    let at = kv + j * d;
                    if lse[r] == f64::NEG_INFINITY { continue; }
                    let p = (scale * dot(qi, &k[at..at + d]) - lse[r]).exp();
                    let ds = scale * p * (dot(gi, &v[at..at + d]) - delta[r]);
                    for e in 0..d {
                        dq[r * d + e] += ds * k[at + e];
                        dk[at + e] += ds * qi[e];
                        dv[at + e] += p * gi[e];
                    }
                }
            }
        }
        (store(dq, &qs, dtype), store(dk, &ks, dtype), store(dv, &vs, dtype))
    }
}
