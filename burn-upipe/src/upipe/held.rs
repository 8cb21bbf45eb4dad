//! Key/value heads between their arrival and their departure, and the gradients that gather for them.

use burn::tensor::Tensor;
use burn_context_parallel::attention::select_heads;

use super::RankStage;

/// Key/value heads over the whole sequence, [B, S, heads, D], in bundles as they arrived.
#[derive(Default)]
pub(super) struct Held {
    bundles: Vec<Bundle>,
}

struct Bundle {
    heads: Vec<usize>,
    k: Tensor<4>,
    v: Tensor<4>,
}

impl Held {
    pub(super) fn insert(&mut self, heads: &[usize], k: Tensor<4>, v: Tensor<4>) {
        self.bundles.push(Bundle { heads: heads.to_vec(), k, v });
    }

    /// Frees what arrived together once all of it is through: a view of a part would keep the whole.
    pub(super) fn release(&mut self, stage: &RankStage) {
        let stays = |head: &usize| stage.held.contains(head) && !stage.leaving.contains(head);
        self.bundles.retain(|bundle| bundle.heads.iter().any(stays));
    }

    /// These heads in increasing order, [B, S, heads, D]; a view if they are neighbours that arrived together.
    pub(super) fn select(&self, needed: &[usize]) -> (Tensor<4>, Tensor<4>) {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for bundle in &self.bundles {
            let wanted: Vec<usize> =
                (0..bundle.heads.len()).filter(|index| needed.contains(&bundle.heads[*index])).collect();
            if !wanted.is_empty() {
                k.push(select_heads(&bundle.k, &wanted));
                v.push(select_heads(&bundle.v, &wanted));
            }
        }
        (join(k, 2), join(v, 2))
    }
}

/// Gradients dk, dv of held heads, [B, 1, S, D] each, until the last query head that reads them is through.
#[derive(Default)]
pub(super) struct Sums {
    heads: Vec<(usize, Tensor<4>, Tensor<4>)>,
}

impl Sums {
    /// Takes the sums of exactly these heads out, [B, heads, S, D]; `None` if there are none, or not of all of them.
    pub(super) fn take(&mut self, heads: &[usize]) -> Option<(Tensor<4>, Tensor<4>)> {
        let known = |head: &usize| self.heads.iter().any(|(known, ..)| known == head);
        if heads.is_empty() || !heads.iter().all(known) {
            return None;
        }
        let (mut dk, mut dv) = (Vec::new(), Vec::new());
        for head in heads {
            let at = self.heads.iter().position(|(known, ..)| known == head).expect("checked above");
            let (_, k, v) = self.heads.swap_remove(at);
            dk.push(k);
            dv.push(v);
        }
        Some((join(dk, 1), join(dv, 1)))
    }

    /// Adds gradients [B, heads, S, D].
    pub(super) fn add(&mut self, heads: &[usize], dk: Tensor<4>, dv: Tensor<4>) {
        if let [head] = heads {
            return self.add_one(*head, dk, dv);
        }
        for (index, head) in heads.iter().enumerate() {
            self.add_one(*head, dk.clone().narrow(1, index, 1), dv.clone().narrow(1, index, 1));
        }
    }

    fn add_one(&mut self, head: usize, dk: Tensor<4>, dv: Tensor<4>) {
        match self.heads.iter().position(|(known, ..)| *known == head) {
            Some(at) => {
                let (_, k, v) = self.heads.swap_remove(at);
                self.heads.push((head, k + dk, v + dv));
            }
            None => self.heads.push((head, dk, dv)),
        }
    }
}

/// One tensor of all parts; `cat` of a single one would copy it on some backends.
fn join(mut parts: Vec<Tensor<4>>, dim: usize) -> Tensor<4> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, dim) }
}
