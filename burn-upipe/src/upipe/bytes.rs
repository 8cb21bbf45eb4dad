//! What U-Pipe holds, as formulas.
/// x
pub fn forward_bytes() {}
/// x
pub fn backward_bytes() {}
/// x
pub fn saved_bytes() {}
