// Epilogues that the product does not apply itself: a product without epilogue, and an op on its result.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/vit/gelu.h"

namespace gradwire {

// Returns g without its epilogue: the product leaves x in C, or for gelu_tanh in aux, if aux is given.
inline Gemm without_epilogue(Gemm g) {
  if (g.epilogue == Epilogue::gelu_tanh && g.aux.data != nullptr) g.c = g.aux;
  g.epilogue = Epilogue::none;
  g.aux = nullptr;
  return g;
}

// Return the op for gelu_tanh and the op for d_gelu_tanh; S is C's type.
template <typename S>
BiasGelu<S> gelu_after(const Gemm& g) {
  S* c = g.c.at<S>(0);
  return {
      .x = g.aux.data != nullptr ? g.aux.at<S>(0) : c, .y = c, .rows = g.m, .width = g.n, .form = Gelu::tanh};
}
template <typename S>
BiasGeluBackward<S> d_gelu_after(const Gemm& g) {
  S* c = g.c.at<S>(0);
  return {.pre = g.aux.at<S>(0), .dy = c, .d_pre = c, .rows = g.m, .width = g.n, .form = Gelu::tanh};
}

}  // namespace gradwire
