"""Ops with kernels in low precision that have no row in `tfamp.planning.kernels`, and why not.

One set of names for each reason. An op of a new TensorFlow belongs to one of them, or into
the table after a case in `kernel_cases` has measured it.
"""

from __future__ import annotations

import re

# Forms that oneDNN and the graph optimizer give to ops listed under their own names.
INTERNAL = re.compile(r"_+Mkl\w+|_Fused\w+|_QuantizedMatMul|_UnaryOpsComposition")

_TEXT: dict[str, str] = {
    "one result for each element, from few values": """
        Abs Acos Acosh Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e
        BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 BiasAddV1
        BatchNormWithGlobalNormalization Cast Ceil ClipByValue Cos Cosh Cross Dequantize Digamma Div
        DivNoNan Elu EluGrad Erf Exp Expm1 Floor FloorDiv FloorMod HSVToRGB Inv InvGrad
        LeakyRelu LeakyReluGrad Lgamma Log Log1p Maximum Minimum Mul MulNoNan Neg Pow RGBToHSV
        RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad
        Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad
        SparseDenseCwiseAdd SparseDenseCwiseDiv SparseDenseCwiseMul SparseSparseMaximum
        SparseSparseMinimum Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh
        TanhGrad TruncateDiv Xdivy Xlog1py Xlogy
    """,
    "comparisons, and choices among values": """
        ApproxTopK ArgMax ArgMin Bucketize EditDistance Equal Greater GreaterEqual IsFinite IsInf
        IsNan Less LessEqual ListDiff LowerBound Max MaxPool MaxPool3D MaxPool3DGradGrad
        MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Min
        NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5 NotEqual
        NthElement SegmentMax SegmentMin Select SelectV2 SparseReduceMax SparseReduceMaxSparse
        TensorScatterMax TensorScatterMin TopK TopKV2 Unique UniqueV2 UniqueWithCounts
        UniqueWithCountsV2 UnsortedSegmentMax UnsortedSegmentMin UpperBound Where RefSelect
    """,
    "moved or copied values": """
        AddManySparseToTensorsMap BarrierInsertMany BatchMatrixBandPart BatchMatrixDiag
        BatchMatrixDiagPart BatchMatrixSetDiag BatchToSpace BatchToSpaceND BroadcastTo Concat
        ConcatV2 ConjugateTranspose Const DecodePaddedRaw DecodeRaw DeepCopy DepthToSpace Diag
        DiagPart DrawBoundingBoxes DrawBoundingBoxesV2 DynamicPartition DynamicStitch Empty
        EnsureShape ExpandDims ExtractImagePatches ExtractVolumePatches Fill Gather GatherNd
        GatherV2 Identity InplaceUpdate MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2
        MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
        MirrorPad OneHot OnesLike Pack Pad PadV2 ParallelConcat ParallelDynamicStitch
        PlaceholderWithDefault PreventGradient RaggedFillEmptyRows RaggedGather
        RaggedTensorFromVariant RaggedTensorToTensor RaggedTensorToVariant
        RaggedTensorToVariantGradient Range Rank Reshape ResizeNearestNeighbor ResourceGather
        ResourceGatherNd Reverse ReverseSequence ReverseV2 Roll SerializeManySparse SerializeTensor
        Shape ShapeN Size Slice Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth SparseConcat
        SparseFillEmptyRows SparseReorder SparseSlice SparseSliceGrad SparseSplit
        SparseTensorSliceDataset SparseToDense Split SplitV Squeeze StopGradient StridedSlice
        StridedSliceGrad TakeManySparseFromTensorsMap TensorScatterUpdate TensorStridedSliceUpdate
        Tile Transpose Unpack ZerosLike _ParallelConcatStart _ParallelConcatUpdate
    """,
    "control flow, lists, stacks, debugging, calls": """
        CheckNumerics CheckNumericsV2 DebugGradientIdentity DebugNanCount DebugNumericSummaryV2
        EagerPyFunc Enter Exit GetSessionHandle GetSessionHandleV2 GetSessionTensor HistogramSummary
        Merge NextIteration RefEnter RefExit RefIdentity RefMerge RefNextIteration RefSwitch
        ScalarSummary StackPop StackPopV2 StackPush StackPushV2 Switch TensorArray
        TensorArrayConcat TensorArrayConcatV2 TensorArrayConcatV3 TensorArrayGather
        TensorArrayGatherV2 TensorArrayGatherV3 TensorArrayPack TensorArrayRead TensorArrayReadV2
        TensorArrayReadV3 TensorArrayScatter TensorArrayScatterV2 TensorArrayScatterV3
        TensorArraySplit TensorArraySplitV2 TensorArraySplitV3 TensorArrayUnpack TensorArrayV2
        TensorArrayV3 TensorArrayWrite TensorArrayWriteV2 TensorArrayWriteV3 TensorListConcat
        TensorListConcatV2 TensorListFromTensor TensorListGather TensorListGetItem TensorListPopBack
        TensorListPushBackBatch TensorListScatter TensorListScatterIntoExistingList
        TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack TensorSummary
        TensorSummaryV2 _Arg _ArrayToList _EagerConst _ListToArray _Retval _SwitchN
    """,
    "random numbers": """
        Multinomial ParameterizedTruncatedNormal RandomCrop RandomGamma RandomPoisson
        RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform StatefulRandomBinomial
        StatefulStandardNormal StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
        StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
        StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2
        StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformV2 StatelessShuffle
        StatelessTruncatedNormal StatelessTruncatedNormalV2 StochasticCastToInt TruncatedNormal
    """,
    "variables: as exact as their dtype, which the user or a level chooses": """
        Assign AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp AssignVariableOp
        DestroyTemporaryVariable InplaceAdd InplaceSub IsVariableInitialized ResourceScatterAdd
        ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul
        ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub
        ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate ResourceStridedSliceAssign
        ScatterAdd ScatterDiv ScatterMax ScatterMin ScatterMul ScatterNdAdd ScatterNdMax
        ScatterNdMin ScatterNdSub ScatterNdUpdate ScatterSub ScatterUpdate StridedSliceAssign
        TemporaryVariable VarHandleOp Variable VariableV2 _VarHandlesOp
    """,
    "updates by optimizers, of variables": """
        ApplyAdaMax ApplyAdadelta ApplyAdagrad ApplyAdagradV2 ApplyAdam ApplyAddSign
        ApplyCenteredRMSProp ApplyFtrl ApplyFtrlV2 ApplyGradientDescent ApplyMomentum ApplyPowerSign
        ApplyProximalAdagrad ApplyRMSProp ResourceApplyAdaMax ResourceApplyAdadelta
        ResourceApplyAdagrad ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyAdamWithAmsgrad
        ResourceApplyAddSign ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2
        ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum
        ResourceApplyPowerSign ResourceApplyProximalAdagrad ResourceApplyRMSProp
        ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad ResourceSparseApplyAdagradV2
        ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2
        ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum
        ResourceSparseApplyProximalAdagrad ResourceSparseApplyRMSProp SparseApplyAdadelta
        SparseApplyAdagrad SparseApplyAdagradV2 SparseApplyCenteredRMSProp SparseApplyFtrl
        SparseApplyFtrlV2 SparseApplyMomentum SparseApplyProximalAdagrad SparseApplyRMSProp
    """,
    "accumulators of gradients, which add up in the dtype that the user gives them": """
        ConditionalAccumulator ResourceConditionalAccumulator SparseConditionalAccumulator
    """,
    "measured: adds up in float32, or is within four roundings": """
        BatchMatMul BatchMatMulV2 BatchMatMulV3 FusedBatchNormGradV2
        FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 FusedPadConv2D
        FusedResizeAndPadConv2D LogSoftmax MatMul Softmax
        SoftmaxCrossEntropyWithLogits SparseMatMul SparseReduceSum SparseReduceSumSparse
        SparseSegmentMean SparseSegmentMeanGrad SparseSegmentMeanGradV2
        SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad
        SparseSegmentSqrtNGradV2 SparseSegmentSqrtNWithNumSegments SparseSegmentSum
        SparseSegmentSumGrad SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSoftmax
        SparseSoftmaxCrossEntropyWithLogits
    """,
    "a few values in each result: windows of interpolation, edges, matrices": """
        BatchMatrixInverse CropAndResize Dilation2D ImageProjectiveTransformV2
        ImageProjectiveTransformV3 MatrixInverse MirrorPadGrad Qr
    """,
    "recurrent cells: MatMul's kernel, and a few roundings for each gate": """
        BlockLSTM BlockLSTMV2 LSTMBlockCell LSTMBlockCellGrad
    """,
    "results in float32 or integers, whatever the input is": """
        Bincount CropAndResizeGradBoxes DenseBincount HistogramFixedWidth IsotonicRegression
        RaggedBincount ResizeArea ResizeBicubic ResizeBilinear ScaleAndTranslate SparseBincount
    """,
    "float32 inside: interpolated gradients are added up, then rounded": "ResizeBilinearGrad",
    "cannot be called any more: TensorFlow refuses it in today's graphs": """
        BatchNormWithGlobalNormalizationGrad Conv3DBackpropFilter Conv3DBackpropInput TileGrad
    """,
    "kernels on GPUs only, not measured": """
        AdjustContrastv2 AdjustHue AdjustSaturation CudnnRNNCanonicalToParams
        CudnnRNNCanonicalToParamsV2 CudnnRNNParamsSize CudnnRNNParamsToCanonical
        CudnnRNNParamsToCanonicalV2
    """,
}
CATEGORIES: dict[str, frozenset[str]] = {
    reason: frozenset(names.split()) for reason, names in _TEXT.items()
}
