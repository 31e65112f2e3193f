// What an epilogue is where the product does not apply it itself: a product without it, and an op over what that leaves.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/vit/gelu.h"

namespace gradwire {

// Leaves x in C; what epilogue gelu_tanh keeps of it, in aux if there is one.
inline Gemm without_epilogue(Gemm g) {
  if (g.epilogue == Epilogue::gelu_tanh && g.aux.data != nullptr) g.c = g.aux;
  g.epilogue = Epilogue::none;
  g.aux = nullptr;
  return g;
}

// The op for gelu_tanh, and that for d_gelu_tanh; S is C's type.
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
